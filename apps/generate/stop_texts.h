#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace generate {

/// Lets text through up to the first of the stop texts. What may become one is held back.
class StopTexts {
 public:
  explicit StopTexts(std::vector<std::string> texts) : texts_(std::move(texts)) {}

  /// What is sure to stand before any stop text.
  std::string push(std::string_view text);
  /// What was held back, when no more comes.
  std::string finish();
  /// A stop text was met: nothing more comes through.
  bool met() const { return met_; }

 private:
  std::vector<std::string> texts_;
  std::string held_;
  bool met_ = false;
};

}  // namespace generate
