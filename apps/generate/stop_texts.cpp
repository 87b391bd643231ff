#include "stop_texts.h"

#include <algorithm>
#include <utility>

namespace generate {

std::string StopTexts::push(std::string_view text) {
  if (met_) return "";
  held_ += text;
  size_t first = std::string::npos, hold = 0;
  for (const auto& stop : texts_) {
    first = std::min(first, held_.find(stop));
    // The longest end of the text that begins the stop text.
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > hold; --n) {
      if (std::string_view(held_).substr(held_.size() - n) == std::string_view(stop).substr(0, n)) {
        hold = n;
        break;
      }
    }
  }
  met_ = first != std::string::npos;
  auto sure = held_.substr(0, met_ ? first : held_.size() - hold);
  held_.erase(0, met_ ? held_.size() : sure.size());
  return sure;
}

std::string StopTexts::finish() {
  return std::exchange(held_, "");
}

}  // namespace generate
