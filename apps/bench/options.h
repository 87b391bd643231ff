#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace bench {

/// The command line.
struct Options {
  std::string command;             ///< a name of `commands()`, or "serve"
  std::string mode = "forward";    ///< of `attention`: a name of kAttentionModes, or "all"
  std::string filter;              ///< rows whose name holds it; empty = every row
  std::string json;                ///< a path; empty = not asked for
  std::optional<int64_t> threads;  ///< LibTorch's own choice when not given
  bool quick = false;
};

/// Reads the command line; empty when --help or --version was asked for and has been answered.
/// @throws apps::UsageError
std::optional<Options> parse_options(int argc, char** argv, const std::string& version);

}  // namespace bench
