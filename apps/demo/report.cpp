#include "report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <cmath>

namespace demo {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kNameWidth = 28;  // of a row's first column

}  // namespace

struct Report::Document {
  Json root = Json::object();
};

Report::Report(const apps::Console& console)
    : console_(console), document_(std::make_unique<Document>()) {}

Report::~Report() = default;

void Report::chapter(std::string_view key, std::string_view title) {
  chapter_ = key;
  document_->root[chapter_] = Json::object();
  console_.print(fmt::format(
      "\n{}\n\n", console_.styled(fmt::format("{}. {}", ++chapters_, title), apps::Style::bold)));
}

void Report::line(std::string_view text) {
  const auto end = text.find_last_not_of(' ');
  console_.print(end == std::string_view::npos ? "\n"
                                               : fmt::format("  {}\n", text.substr(0, end + 1)));
}

void Report::note(std::string_view text) {
  console_.print(fmt::format("  {}\n", console_.styled(text, apps::Style::dim)));
}

void Report::block(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    out += end == 0 ? "\n" : fmt::format("  {}\n", text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  console_.print(out);
}

void Report::shape(std::string_view key, std::string_view name, std::string_view letters,
                   const std::vector<int64_t>& sizes, std::string_view remark) {
  keep(key, sizes);
  auto text =
      fmt::format("{:<10}{:<16}{:<16}", name, letters, fmt::format("({})", fmt::join(sizes, ", ")));
  if (remark.empty()) text.erase(text.find_last_not_of(' ') + 1);
  line(text + console_.styled(remark, apps::Style::dim));
}

void Report::value(std::string_view key, std::string_view name, int64_t value,
                   std::string_view remark) {
  keep(key, value);
  line(fmt::format(
      "{:<{}}{}{}", name, kNameWidth, with_commas(value),
      remark.empty() ? "" : console_.styled(fmt::format("  {}", remark), apps::Style::dim)));
}

void Report::value(std::string_view key, std::string_view name, double value,
                   std::string_view remark) {
  keep(key, value);
  line(fmt::format(
      "{:<{}}{}{}", name, kNameWidth, readable(value),
      remark.empty() ? "" : console_.styled(fmt::format("  {}", remark), apps::Style::dim)));
}

void Report::series(std::string_view key, std::string_view name,
                    const std::vector<double>& values) {
  keep(key, values);
  auto text = fmt::format("{:<{}}", name, kNameWidth);
  for (const double value : values) text += fmt::format("{:>10}", readable(value));
  line(text);
}

void Report::keep(std::string_view key, const Value& value) {
  auto& place = chapter_.empty() ? document_->root : document_->root[chapter_];
  place[std::string(key)] = std::visit([](const auto& v) { return Json(v); }, value);
}

void Report::check(std::string_view statement, bool holds) {
  ++checks_;
  if (!holds) failed_.emplace_back(statement);
  document_->root["checks"].push_back(
      {{"chapter", chapter_}, {"check", statement}, {"holds", holds}});
  line(fmt::format(
      "{} {}",
      console_.styled(holds ? "[ok]" : "[FAILED]", holds ? apps::Style::good : apps::Style::bad),
      statement));
}

void Report::check_if(bool applies, std::string_view condition, std::string_view statement,
                      bool holds) {
  if (applies) {
    check(statement, holds);
  } else {
    note(fmt::format("[--] not checked, as it takes {}: {}", condition, statement));
  }
}

bool Report::finish(double seconds) {
  chapter_.clear();
  keep("seconds", seconds);
  const bool ok = failed_.empty() && checks_ > 0;
  keep("ok", ok);
  if (ok) {
    console_.print(fmt::format("\n{} checks hold, {:.1f} s.\n{}\n", checks_, seconds,
                               console_.styled("Demo OK.", apps::Style::good)));
  } else {
    console_.print(fmt::format(
        "\n{}\n", console_.styled(fmt::format("Demo FAILED: {} of {} checks do not hold: {}.",
                                              failed_.size(), checks_, fmt::join(failed_, "; ")),
                                  apps::Style::bad)));
  }
  return ok;
}

std::string Report::json() const {
  // A NaN becomes null: JSON has no word for it.
  return document_->root.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string readable(double value) {
  if (value == 0.0) return "0";
  const double size = std::abs(value);
  if (size < 1e-2 || size >= 1e6) return fmt::format("{:.2e}", value);
  return fmt::format("{:.4f}", value);
}

std::string with_commas(int64_t value) {
  auto digits = std::to_string(value);
  const int64_t first = value < 0 ? 1 : 0;
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > first; at -= 3) {
    digits.insert(static_cast<size_t>(at), 1, ',');
  }
  return digits;
}

}  // namespace demo
