#pragma once

#include <string>
#include <vector>

namespace process {

/// What a finished process left behind.
struct Result {
  int exit_code;  ///< -1 if a signal ended it
  int signal;     ///< 0 if it ended by itself
  std::string out;
  std::string err;
};

enum class Out {
  pipe,
  terminal,  ///< a pseudo-terminal of 80 columns
  closed,    ///< a pipe that nobody reads
  full,      ///< /dev/full
};

/// Runs a program with `arguments`, "NAME=value" set in its environment (and "NAME" removed from
/// it).
Result run(const std::string& program, const std::vector<std::string>& arguments,
           const std::vector<std::string>& environment = {}, Out out = Out::pipe);

}  // namespace process
