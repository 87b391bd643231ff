#include "process.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <poll.h>
#include <stdexcept>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

namespace process {
namespace {

using Ends = std::pair<int, int>;  // to read from, to write to

Ends open_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  return {ends[0], ends[1]};
}

Ends open_terminal() {
  const int main = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (main < 0 || grantpt(main) != 0 || unlockpt(main) != 0) {
    throw std::runtime_error("no pseudo-terminal");
  }
  const winsize size{.ws_row = 24, .ws_col = 80, .ws_xpixel = 0, .ws_ypixel = 0};
  const int other = open(ptsname(main), O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (other < 0 || ioctl(other, TIOCSWINSZ, &size) != 0) {
    throw std::runtime_error("no pseudo-terminal");
  }
  return {main, other};
}

Ends open_out(Out out) {
  switch (out) {
    case Out::terminal:
      return open_terminal();
    case Out::full:
      return {-1, open("/dev/full", O_WRONLY | O_CLOEXEC)};
    case Out::closed: {
      const auto ends = open_pipe();
      close(ends.first);
      return {-1, ends.second};
    }
    case Out::pipe:
      break;
  }
  return open_pipe();
}

[[noreturn]] void become(const std::string& program, const std::vector<std::string>& arguments,
                         const std::vector<std::string>& environment, int out, int err) {
  for (const auto& entry : environment) {
    const auto equals = entry.find('=');
    if (equals == std::string::npos) {
      unsetenv(entry.c_str());
    } else {
      setenv(entry.substr(0, equals).c_str(), entry.substr(equals + 1).c_str(), 1);
    }
  }
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  execv(program.c_str(), argv.data());
  _exit(127);
}

// Reads both until both have ended. A terminal ends with EIO.
void drain(int out, int err, Result& result) {
  std::array<pollfd, 2> ends = {pollfd{out, POLLIN, 0}, pollfd{err, POLLIN, 0}};
  const std::array<std::string*, 2> texts = {&result.out, &result.err};
  std::array<char, 4096> chunk{};
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    if (poll(ends.data(), ends.size(), -1) < 0 && errno != EINTR) return;
    for (size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].fd < 0 || ends[i].revents == 0) continue;
      const auto count = read(ends[i].fd, chunk.data(), chunk.size());
      if (count > 0) {
        texts[i]->append(chunk.data(), static_cast<size_t>(count));
      } else if (count == 0 || errno != EINTR) {
        close(ends[i].fd);
        ends[i].fd = -1;
      }
    }
  }
}

}  // namespace

Result run(const std::string& program, const std::vector<std::string>& arguments,
           const std::vector<std::string>& environment, Out out) {
  const auto [out_read, out_write] = open_out(out);
  const auto [err_read, err_write] = open_pipe();
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) become(program, arguments, environment, out_write, err_write);
  close(out_write);
  close(err_write);

  Result result{-1, 0, "", ""};
  drain(out_read, err_read, result);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  return result;
}

}  // namespace process
