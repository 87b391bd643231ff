#pragma once

#include <functional>
#include <stdexcept>
#include <string_view>

namespace apps {

/// The command line makes no sense: exit code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Runs a program's body and returns its exit code: the body's own, 2 for a UsageError, 1 for any
/// other exception. What went wrong is one line on standard error that begins with `name`, without
/// a back-trace.
int run_program(std::string_view name, const std::function<int()>& body);

}  // namespace apps
