#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace apps {

/// Any bytes as text that is safe on a terminal: whole UTF-8 characters stay, everything else is
/// escaped
/// (`\n`, `\t`, `\x1b`; stray bytes, control and invisible or direction-changing characters too).
std::string printable(std::string_view bytes);

/// As `printable`, in lines of at most `width` columns; a newline in `bytes` starts a new line.
std::vector<std::string> printable_lines(std::string_view bytes, size_t width);

}  // namespace apps
