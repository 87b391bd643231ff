#include "support/printable.h"

#include <fmt/format.h>

#include <cstdint>

namespace apps {
namespace {

// Length of the well-formed UTF-8 sequence that `bytes` starts with (Unicode 15, table 3-7); 0 if
// none does.
size_t sequence_length(std::string_view bytes, uint32_t& code_point) {
  const auto byte = [&](size_t i) {
    return i < bytes.size() ? static_cast<uint32_t>(static_cast<unsigned char>(bytes[i])) : 0U;
  };
  const uint32_t lead = byte(0);
  size_t length = 0;
  uint32_t least = 0;
  if (lead < 0x80) {
    code_point = lead;
    return 1;
  }
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
    least = 0x80;
    code_point = lead & 0x1FU;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    least = 0x800;
    code_point = lead & 0x0FU;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    least = 0x10000;
    code_point = lead & 0x07U;
  } else {
    return 0;
  }
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0U) != 0x80U) return 0;
    code_point = (code_point << 6U) | (byte(i) & 0x3FU);
  }
  const bool surrogate = code_point >= 0xD800 && code_point <= 0xDFFF;
  return code_point < least || code_point > 0x10FFFF || surrogate ? 0 : length;
}

// Neither a control character nor one that hides or reorders what stands beside it.
bool visible(uint32_t c) {
  const auto between = [c](uint32_t first, uint32_t last) { return c >= first && c <= last; };
  return !(c < 0x20 || between(0x7F, 0x9F) || c == 0xAD || c == 0x61C || between(0x200B, 0x200F) ||
           between(0x2028, 0x202E) || between(0x2060, 0x206F) || between(0xE000, 0xF8FF) ||
           between(0xFE00, 0xFE0F) || c == 0xFEFF || between(0xFFF0, 0xFFFB) || c >= 0xE0000 ||
           (c & 0xFFFEU) == 0xFFFEU);
}

// The next character of `bytes`, printable, and how many bytes it takes.
std::string next_character(std::string_view bytes, size_t& length) {
  uint32_t code_point = 0;
  length = sequence_length(bytes, code_point);
  if (length > 0 && visible(code_point)) return std::string(bytes.substr(0, length));
  length = 1;
  switch (bytes[0]) {
    case '\n':
      return "\\n";
    case '\r':
      return "\\r";
    case '\t':
      return "\\t";
    default:
      return fmt::format("\\x{:02x}", static_cast<unsigned char>(bytes[0]));
  }
}

}  // namespace

std::string printable(std::string_view bytes) {
  std::string out;
  size_t length = 0;
  for (; !bytes.empty(); bytes.remove_prefix(length)) out += next_character(bytes, length);
  return out;
}

std::vector<std::string> printable_lines(std::string_view bytes, size_t width) {
  std::vector<std::string> lines(1);
  size_t columns = 0;
  size_t length = 0;
  for (; !bytes.empty(); bytes.remove_prefix(length)) {
    if (bytes[0] == '\n') {
      length = 1;
      columns = 0;
      lines.emplace_back();
      continue;
    }
    const auto character = next_character(bytes, length);
    const size_t cells = character[0] == '\\' ? character.size() : 1;
    if (columns + cells > width && columns > 0) {
      columns = 0;
      lines.emplace_back();
    }
    columns += cells;
    lines.back() += character;
  }
  return lines;
}

}  // namespace apps
