#pragma once

#include "stop_texts.h"
#include "support/console.h"

#include <attn/byte_level_bpe.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace generate {

/// Takes the new tokens, one by one, and writes them: as text if there is a tokenizer, else as ids.
/// Never half a character, nothing from a stop text on, and on a terminal no control characters.
class Writer {
 public:
  /// `quiet` keeps the text only.
  Writer(const std::optional<attn::ByteLevelBPE>& tokenizer, std::vector<std::string> stop,
         bool quiet);

  /// False if generation should end.
  bool push(int64_t id);
  void finish();

  const std::string& text() const { return text_; }

 private:
  void write(const std::string& text);

  apps::Console console_;
  std::optional<attn::StreamingDecoder> decoder_;
  StopTexts stop_;
  bool quiet_;
  bool first_ = true;
  std::string text_;
};

}  // namespace generate
