#include "support/program.h"

#include "support/printable.h"

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <new>

namespace apps {

int run_program(std::string_view name, const std::function<int()>& body) {
  const auto fail = [name](std::string_view message, int code) {
    std::fputs(fmt::format("{}: {}\n", name, printable(message)).c_str(), stderr);
    return code;
  };
  std::signal(SIGPIPE, SIG_DFL);  // `program | head` ends silently, whatever the parent ignores
  try {
    return body();
  } catch (const UsageError& error) {
    return fail(error.what(), 2);
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace(), 1);
  } catch (const std::bad_alloc&) {
    return fail("out of memory", 1);
  } catch (const std::exception& error) {
    return fail(error.what(), 1);
  }
}

}  // namespace apps
