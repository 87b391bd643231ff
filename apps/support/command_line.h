#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <string>

namespace apps {

/// Accepts a whole number from `least` to `most`.
CLI::Validator whole_number(int64_t least, int64_t most);
/// Accepts a finite number from `least` to `most`.
CLI::Validator real_number(double least, double most);
/// Accepts cpu, cuda and cuda:N.
CLI::Validator device_name();
/// Accepts any name of a file but the empty one.
CLI::Validator file_name();

/// Reads the command line into what `options` was set up with. False when --help or --version was
/// asked for and has been answered.
/// @throws UsageError
bool parse_command_line(CLI::App& options, int argc, char** argv, const std::string& version);

}  // namespace apps
