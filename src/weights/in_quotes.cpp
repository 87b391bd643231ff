#include "weights/in_quotes.h"

#include <cstddef>

namespace attn::weights {

std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 200;
  std::string result = "\"";
  for (const char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    result += byte < 0x20 || byte == 0x7f ? '?' : c;
  }
  return result + (text.size() > kLongest ? "...\"" : "\"");
}

}  // namespace attn::weights
