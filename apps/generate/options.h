#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace generate {

/// What the command line asks for.
struct Options {
  std::string model;  ///< empty with --demo
  bool demo = false;
  std::optional<std::string> prompt;
  std::vector<int64_t> ids;
  bool standard_input = false;

  int64_t max_new_tokens = 128;
  double temperature = 1.0;
  std::optional<int64_t> top_k;
  std::optional<double> top_p;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;

  std::string dtype = "float32";
  std::string device = "cpu";
  std::optional<int64_t> threads;
  bool json = false;
};

/// Nothing when --help or --version was asked for and has been answered.
/// @throws apps::UsageError
std::optional<Options> parse_options(int argc, char** argv, const std::string& version);

}  // namespace generate
