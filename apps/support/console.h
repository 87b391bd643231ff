#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace apps {

enum class Style { bold, dim, good, bad };

/// Standard output: what it is, and what may be written to it.
class Console {
 public:
  /// A terminal that understands escape codes gets a progress bar and, unless NO_COLOR is set,
  /// colours. Anything else (a file, a pipe, TERM=dumb) gets plain lines.
  Console();

  bool terminal() const { return terminal_; }
  /// Width to lay out for.
  size_t columns() const { return columns_; }

  std::string styled(std::string_view text, Style style) const;

  /// Writes at once.
  /// @throws std::runtime_error if that fails.
  void print(std::string_view text) const;

 private:
  bool terminal_ = false;
  bool colour_ = false;
  size_t columns_ = 80;
};

/// One line that redraws itself; nothing at all where the output is no terminal.
class ProgressBar {
 public:
  explicit ProgressBar(const Console& console) : console_(console) {}
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void update(std::string_view label, int64_t done, int64_t total, std::string_view note);
  /// Removes the bar, so that a line can be printed in its place.
  void clear();

 private:
  const Console& console_;
  bool visible_ = false;
  std::chrono::steady_clock::time_point last_{};
};

/// Number of columns that UTF-8 text without control characters takes (every character counts one).
size_t display_width(std::string_view text);

/// Lays multi-line blocks beside one another, as many as fit into `columns`, then the rest below.
std::string side_by_side(const std::vector<std::string>& blocks, size_t columns);

/// `value` of `greatest` as a bar of at most `width` cells.
std::string bar(double value, double greatest, size_t width);

}  // namespace apps
