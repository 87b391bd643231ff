#include "writer.h"

#include "support/printable.h"

#include <fmt/format.h>

namespace generate {
namespace {

// A model's text may hold anything; a terminal must not obey it.
std::string for_terminal(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const auto end = text.find_first_of("\n\t");
    out += apps::printable(text.substr(0, end));
    if (end == std::string_view::npos) break;
    out += text[end];
    text.remove_prefix(end + 1);
  }
  return out;
}

}  // namespace

Writer::Writer(const std::optional<attn::ByteLevelBPE>& tokenizer, std::vector<std::string> stop,
               bool quiet)
    : stop_(std::move(stop)), quiet_(quiet) {
  if (tokenizer) decoder_.emplace(*tokenizer);
}

bool Writer::push(int64_t id) {
  if (decoder_) {
    write(stop_.push(decoder_->push(id)));
    return !stop_.met();
  }
  write(fmt::format("{}{}", first_ ? "" : ",", id));
  first_ = false;
  return true;
}

void Writer::finish() {
  if (decoder_) write(stop_.push(decoder_->finish()));
  write(stop_.finish());
  if (!quiet_) console_.print("\n");
}

void Writer::write(const std::string& text) {
  if (text.empty()) return;
  text_ += text;
  if (!quiet_) console_.print(console_.terminal() ? for_terminal(text) : text);
}

}  // namespace generate
