#include "support/console.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <sys/ioctl.h>
#include <unistd.h>

namespace apps {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<std::string> lines_of(const std::string& block) {
  std::vector<std::string> lines;
  size_t start = 0;
  while (start < block.size()) {
    const auto end = std::min(block.find('\n', start), block.size());
    lines.push_back(block.substr(start, end - start));
    start = end + 1;
  }
  return lines;
}

}  // namespace

Console::Console() {
  const auto term = environment("TERM");
  terminal_ = isatty(STDOUT_FILENO) == 1 && !term.empty() && term != "dumb";
  colour_ = terminal_ && environment("NO_COLOR").empty();  // https://no-color.org
  winsize size{};
  if (terminal_ && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    columns_ = size.ws_col;
  }
}

std::string Console::styled(std::string_view text, Style style) const {
  if (!colour_) return std::string(text);
  const char* code = "1";
  switch (style) {
    case Style::bold:
      break;
    case Style::dim:
      code = "2";
      break;
    case Style::good:
      code = "32";
      break;
    case Style::bad:
      code = "1;31";
      break;
  }
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

void Console::print(std::string_view text) const {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw std::runtime_error(
        fmt::format("cannot write to standard output: {}", std::strerror(errno)));
  }
}

ProgressBar::~ProgressBar() {
  // During an error, so that its line starts on a line of its own.
  if (visible_) std::fputs("\r\x1b[K", stdout);
}

void ProgressBar::update(std::string_view label, int64_t done, int64_t total,
                         std::string_view note) {
  constexpr auto kInterval = std::chrono::milliseconds(50);
  constexpr size_t kWidth = 30;
  const auto now = std::chrono::steady_clock::now();
  if (!console_.terminal() || (visible_ && now - last_ < kInterval)) return;
  last_ = now;

  const auto counts = fmt::format("{}/{}", done, total);
  // A line as wide as the terminal would wrap, and the next redraw would leave it behind.
  const size_t words = label.size() + counts.size() + note.size() + 10;
  const size_t width =
      console_.columns() > words ? std::min(kWidth, console_.columns() - words) : 0;
  const auto filled = static_cast<size_t>(done) * width / static_cast<size_t>(total);
  auto line = fmt::format("  {}  [{}{}]  {}  {}", label, std::string(filled, '#'),
                          std::string(width - filled, '-'), counts, note);
  line.resize(std::min(line.size(), console_.columns() - 1));
  visible_ = true;
  console_.print("\r\x1b[K" + line);
}

void ProgressBar::clear() {
  if (!visible_) return;
  visible_ = false;
  console_.print("\r\x1b[K");
}

size_t display_width(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;  // not a continuation byte
  }));
}

std::string side_by_side(const std::vector<std::string>& blocks, size_t columns) {
  constexpr size_t kGap = 3;
  std::vector<std::vector<std::string>> parts;
  size_t width = 1;
  for (const auto& block : blocks) {
    parts.push_back(lines_of(block));
    for (const auto& line : parts.back()) width = std::max(width, display_width(line));
  }
  const size_t in_a_row = std::max<size_t>(1, (columns + kGap) / (width + kGap));

  std::string out;
  for (size_t first = 0; first < parts.size(); first += in_a_row) {
    const size_t last = std::min(first + in_a_row, parts.size());
    size_t height = 0;
    for (size_t i = first; i < last; ++i) height = std::max(height, parts[i].size());
    if (first > 0) out += '\n';
    for (size_t row = 0; row < height; ++row) {
      std::string line;
      for (size_t i = first; i < last; ++i) {
        const auto cell = row < parts[i].size() ? parts[i][row] : std::string();
        line += cell + std::string(width + kGap - display_width(cell), ' ');
      }
      line.erase(line.find_last_not_of(' ') + 1);
      out += line + '\n';
    }
  }
  return out;
}

std::string bar(double value, double greatest, size_t width) {
  if (!std::isfinite(value) || !(greatest > 0.0)) return "";
  const double share = std::clamp(value / greatest, 0.0, 1.0);
  std::string out;
  for (auto cells = std::lround(share * static_cast<double>(width)); cells > 0; --cells) out += "█";
  return out;
}

}  // namespace apps
