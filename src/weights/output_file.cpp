#include "weights/output_file.h"

#include "weights/in_quotes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fcntl.h>
#include <random>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

namespace attn::weights {
namespace {

namespace fs = std::filesystem;

// What the path means once symbolic links, dangling ones too, are followed.
fs::path behind_links(fs::path path) {
  std::error_code ignored;
  for (int links = 0; links < 40 && fs::is_symlink(path, ignored); ++links) {
    const auto next = fs::read_symlink(path, ignored);
    path = next.is_absolute() ? next : path.parent_path() / next;
  }
  return path;
}

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

// Independent of the target's name, which may be as long as names can be.
std::string temporary_name() {
  static thread_local std::random_device entropy;
  const uint64_t number = uint64_t{entropy()} << 32 | entropy();
  return ".attn-" + std::to_string(::getpid()) + "-" + std::to_string(number) + ".tmp";
}

}  // namespace

OutputFile::OutputFile(const fs::path& path)
    : name_(in_quotes(path.string())), target_(behind_links(path)) {
  std::error_code ignored;
  const auto status = fs::status(target_, ignored);
  TORCH_CHECK(!fs::exists(status) || fs::is_regular_file(status), name_,
              " must be a regular file or new, got a folder, pipe or device");
  written_ = folder_of(target_) / temporary_name();
  fd_ = ::open(written_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);  // less the umask
  if (fd_ < 0) fail("be creatable");
  if (fs::exists(status)) take_over_permissions();
}

OutputFile::~OutputFile() {
  discard();
}

void OutputFile::write(const void* data, size_t size) {
  // Linux writes at most 2^31 - 4096 bytes at a time.
  constexpr size_t kMost = size_t{1} << 30;
  const auto* next = static_cast<const char*>(data);
  while (size > 0) {
    const auto count = ::write(fd_, next, std::min(size, kMost));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("be writable");
    next += count;
    size -= static_cast<size_t>(count);
  }
}

void OutputFile::overwrite(size_t offset, const void* data, size_t size) {
  const auto* next = static_cast<const char*>(data);
  while (size > 0) {
    const auto count = ::pwrite(fd_, next, size, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("be writable");
    next += count;
    offset += static_cast<size_t>(count);
    size -= static_cast<size_t>(count);
  }
}

void OutputFile::commit() {
  if (::fsync(fd_) != 0) fail("be writable");
  const int fd = fd_;
  fd_ = -1;
  const bool closed = ::close(fd) == 0;  // where a network file system tells of a full disk
  if (!closed || std::rename(written_.c_str(), target_.c_str()) != 0) {
    const int error = errno;
    ::unlink(written_.c_str());
    errno = error;
    fail("be writable");
  }
  // The name must outlive a power cut as well. A folder that can't be synced is no failure: the
  // file is whole.
  const int folder = ::open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
}

void OutputFile::fail(const char* what) const {
  TORCH_CHECK(false, name_, " must ", what, ", got: ", std::generic_category().message(errno));
}

// The owner is kept where the system allows it: root's save leaves a user's file the user's.
void OutputFile::take_over_permissions() const {
  struct stat old = {};
  if (::stat(target_.c_str(), &old) != 0) return;
  if (::fchown(fd_, old.st_uid, old.st_gid) != 0) errno = 0;
  ::fchmod(fd_, old.st_mode & 07777);
}

void OutputFile::discard() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(written_.c_str());
  fd_ = -1;
}

void write_file(const fs::path& path, std::string_view text) {
  OutputFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

void make_folder(const fs::path& folder) {
  std::error_code failure;
  fs::create_directories(folder, failure);
  TORCH_CHECK(!failure, in_quotes(folder.string()),
              " must be a folder that can be made, got: ", failure.message());
}

}  // namespace attn::weights
