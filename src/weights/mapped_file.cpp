#include "weights/mapped_file.h"

#include "weights/in_quotes.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace attn::weights {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

std::string reason() {
  return std::generic_category().message(errno);
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : name_(in_quotes(path.string())) {
  // O_NONBLOCK: opening a pipe must not wait for its writer.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  TORCH_CHECK_VALUE(file.get() >= 0, name_, " must be readable, got: ", reason());
  struct stat status = {};
  TORCH_CHECK_VALUE(::fstat(file.get(), &status) == 0, name_, " must be readable, got: ", reason());
  TORCH_CHECK_VALUE(S_ISREG(status.st_mode), name_,
                    " must be a regular file, got a pipe, device or directory");
  size_ = static_cast<size_t>(status.st_size);
  if (size_ == 0) return;  // there is no empty map
  void* map =
      ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
  TORCH_CHECK_VALUE(map != MAP_FAILED, name_, " must be mappable, got: ", reason());
  data_ = static_cast<std::byte*>(map);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

c10::Storage alias_or_copy(const std::shared_ptr<const MappedFile>& file, size_t offset,
                           size_t size, size_t alignment) {
  std::byte* begin = file->data() + offset;
  if (reinterpret_cast<uintptr_t>(begin) % alignment != 0) {
    auto copy = c10::GetCPUAllocator()->allocate(size);
    std::memcpy(copy.mutable_get(), begin, size);
    return {c10::Storage::use_byte_size_t(), size, std::move(copy), c10::GetCPUAllocator(),
            /*resizable=*/true};
  }
  using Owner = std::shared_ptr<const MappedFile>;
  auto owner = std::make_unique<Owner>(file);
  c10::DataPtr alias(
      begin, owner.get(), [](void* context) { delete static_cast<Owner*>(context); }, c10::kCPU);
  owner.release();  // the alias has it now
  return {c10::Storage::use_byte_size_t(), size, std::move(alias), /*allocator=*/nullptr,
          /*resizable=*/false};
}

bool holds_bools(std::string_view bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0 || byte == 1; });
}

}  // namespace attn::weights
