#include "support/command_line.h"

#include "support/program.h"

#include <fmt/format.h>

#include <cctype>
#include <charconv>
#include <cstdio>
#include <system_error>
#include <vector>

namespace apps {
namespace {

// "--threads -1" as "--threads=-1": on its own, CLI11 takes "-1" for an option, and says so.
std::vector<std::string> join_negative_values(int argc, char** argv) {
  std::vector<std::string> arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool negative = argument.size() > 1 && argument[0] == '-' &&
                          std::isdigit(static_cast<unsigned char>(argument[1])) != 0;
    const bool named = !arguments.empty() && arguments.back().starts_with("--") &&
                       arguments.back().find('=') == std::string::npos;
    if (negative && named) {
      arguments.back() += "=" + argument;
    } else {
      arguments.push_back(argument);
    }
  }
  return {arguments.rbegin(), arguments.rend()};  // CLI11 takes them last first
}

}  // namespace

CLI::Validator whole_number(int64_t least, int64_t most) {
  const auto check = [least, most](const std::string& text) {
    int64_t value = 0;
    const auto* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc() && stop == end && value >= least && value <= most)
      return std::string();
    const auto range = most == INT64_MAX ? fmt::format("from {} on", least)
                                         : fmt::format("from {} to {}", least, most);
    return fmt::format("must be a whole number {}, got {}", range, text);
  };
  return {check, ""};
}

CLI::Validator real_number(double least, double most) {
  const auto check = [least, most](const std::string& text) {
    double value = 0;
    const auto* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error == std::errc() && stop == end && value >= least && value <= most)
      return std::string();
    return fmt::format("must be a number from {} to {}, got {}", least, most, text);
  };
  return {check, ""};
}

CLI::Validator device_name() {
  const auto check = [](const std::string& name) {
    const auto index = name.starts_with("cuda:") ? name.substr(5) : "";
    const bool numbered = !index.empty() && index.size() <= 2 &&
                          index.find_first_not_of("0123456789") == std::string::npos &&
                          (index.size() == 1 || index[0] != '0');
    if (name == "cpu" || name == "cuda" || numbered) return std::string();
    return "must be cpu, cuda or cuda:N, got " + name;
  };
  return {check, ""};
}

CLI::Validator file_name() {
  const auto check = [](const std::string& path) {
    return std::string(path.empty() ? "must name a file, got an empty name" : "");
  };
  return {check, ""};
}

bool parse_command_line(CLI::App& options, int argc, char** argv, const std::string& version) {
  try {
    options.parse(join_negative_values(argc, argv));
    return true;
  } catch (const CLI::CallForHelp&) {
    std::fputs(options.help().c_str(), stdout);
    return false;
  } catch (const CLI::CallForVersion&) {
    std::puts(version.c_str());
    return false;
  } catch (const CLI::ParseError& error) {
    // CLI11 writes "--name: " before what a validator says.
    std::string message = error.what();
    if (const auto at = message.find(": must "); at != std::string::npos) message.erase(at, 1);
    throw UsageError(message);
  }
}

}  // namespace apps
