#pragma once

#include "support/console.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace demo {

/// What the JSON file keeps under a name.
using Value =
    std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<double>>;

/// What the demo tells: prints it, and keeps every number and every check for --json and the last
/// line.
class Report {
 public:
  explicit Report(const apps::Console& console);
  ~Report();
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  const apps::Console& console() const { return console_; }

  /// Starts a numbered chapter; what follows is kept under `key`.
  void chapter(std::string_view key, std::string_view title);

  void line(std::string_view text = "");
  /// A remark, less prominent than a line.
  void note(std::string_view text);
  /// Several lines as they are, indented.
  void block(std::string_view text);

  /// `name  [letters]  (sizes)  remark`, as Python writes a shape.
  void shape(std::string_view key, std::string_view name, std::string_view letters,
             const std::vector<int64_t>& sizes, std::string_view remark = "");
  /// `name  value  remark`.
  void value(std::string_view key, std::string_view name, int64_t value,
             std::string_view remark = "");
  void value(std::string_view key, std::string_view name, double value,
             std::string_view remark = "");
  /// `name  v0  v1  ...` in columns.
  void series(std::string_view key, std::string_view name, const std::vector<double>& values);
  /// Kept, not printed: for numbers that a line or a block shows.
  void keep(std::string_view key, const Value& value);

  /// A statement and whether it holds.
  void check(std::string_view statement, bool holds);
  /// A check that is only meant under a condition, `condition` in words.
  void check_if(bool applies, std::string_view condition, std::string_view statement, bool holds);

  /// The last lines of the demo; true if every check held.
  bool finish(double seconds);
  std::string json() const;

 private:
  const apps::Console& console_;
  struct Document;
  std::unique_ptr<Document> document_;
  std::string chapter_;
  int chapters_ = 0;
  int checks_ = 0;
  std::vector<std::string> failed_;
};

/// Four decimals; a plain 0 only for exactly 0, and powers of ten for what four decimals can't
/// show.
std::string readable(double value);
/// 2694144 -> "2,694,144"
std::string with_commas(int64_t value);

}  // namespace demo
