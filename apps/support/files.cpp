#include "support/files.h"

#include "support/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <stdexcept>
#include <sys/stat.h>
#include <unistd.h>

namespace apps {
namespace {

[[noreturn]] void fail(std::string_view verb, const std::string& path, int error) {
  throw std::runtime_error(
      fmt::format("cannot {} {}: {}", verb, printable(path), std::strerror(error)));
}

// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor(const std::string& path, int flags)
      : fd_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  bool valid() const { return fd_ >= 0; }
  int get() const { return fd_; }
  bool close() {
    const bool closed = fd_ < 0 || ::close(fd_) == 0;
    fd_ = -1;
    return closed;
  }

 private:
  int fd_;
};

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const auto written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

// Where the bytes go: the file that a symbolic link points to, not the link.
std::string target_of(const std::string& path) {
  std::error_code error;
  const auto target = std::filesystem::canonical(path, error);
  return error ? path : target.string();
}

bool is_special(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return false;
  if (S_ISDIR(status.st_mode)) fail("write", path, EISDIR);
  return !S_ISREG(status.st_mode);
}

std::string name_beside(const std::string& target) {
  return fmt::format("{}.{}.tmp", target, getpid());
}

}  // namespace

std::string read_file(const std::string& path, size_t limit) {
  const Descriptor file(path, O_RDONLY);
  if (!file.valid()) fail("read", path, errno);
  std::string text;
  std::array<char, 1 << 16> chunk{};
  while (text.size() < limit) {
    const auto count =
        ::read(file.get(), chunk.data(), std::min(chunk.size(), limit - text.size()));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("read", path, errno);
    if (count == 0) break;
    text.append(chunk.data(), static_cast<size_t>(count));
  }
  return text;
}

void check_writable(const std::string& path) {
  const auto target = target_of(path);
  if (is_special(target)) {
    if (access(target.c_str(), W_OK) != 0) fail("write", path, errno);
    return;
  }
  const auto beside = name_beside(target);
  const Descriptor file(beside, O_WRONLY | O_CREAT | O_EXCL);
  if (!file.valid()) fail("write", path, errno);
  unlink(beside.c_str());
}

void write_file(const std::string& path, std::string_view text) {
  const auto target = target_of(path);
  if (is_special(target)) {
    Descriptor file(target, O_WRONLY);
    if (!file.valid() || !write_all(file.get(), text) || !file.close()) fail("write", path, errno);
    return;
  }
  const auto beside = name_beside(target);
  Descriptor file(beside, O_WRONLY | O_CREAT | O_EXCL);
  if (!file.valid()) fail("write", path, errno);
  if (!write_all(file.get(), text) || !file.close() ||
      std::rename(beside.c_str(), target.c_str()) != 0) {
    const int error = errno;
    unlink(beside.c_str());
    fail("write", path, error);
  }
}

}  // namespace apps
