#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace attn::weights {

/// A regular file's bytes, mapped privately: what is written to them stays in memory.
class MappedFile {
 public:
  /// @throws c10::ValueError if it can't be opened or is no regular file.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& name() const { return name_; }  ///< for messages
  size_t size() const { return size_; }
  std::byte* data() const { return data_; }
  std::string_view bytes() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  std::string name_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// Bytes [offset, offset + size) of the file, which must be in it, as a storage that aliases the
/// map and keeps it; a copy where they are not aligned to `alignment`.
c10::Storage alias_or_copy(const std::shared_ptr<const MappedFile>& file, size_t offset,
                           size_t size, size_t alignment);

/// No byte is other than 0 and 1: C++ must not meet another in a bool.
bool holds_bools(std::string_view bytes);

}  // namespace attn::weights
