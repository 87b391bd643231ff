#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace attn::weights {

/// A file that appears whole or not at all: written beside its place under a name of its own,
/// synced and renamed by `commit`. Without a commit nothing is left of it.
class OutputFile {
 public:
  /// A symbolic link is followed; an existing file's permissions are taken over.
  /// @throws c10::Error, as all of it, when the system refuses.
  explicit OutputFile(const std::filesystem::path& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const std::string& name() const { return name_; }  ///< for messages
  void write(const void* data, size_t size);
  /// Writes over what was written at `offset`: for a header that is known last.
  void overwrite(size_t offset, const void* data, size_t size);
  void commit();

 private:
  [[noreturn]] void fail(const char* what) const;
  void take_over_permissions() const;
  void discard();

  std::string name_;               // for messages
  std::filesystem::path target_;   // behind symbolic links
  std::filesystem::path written_;  // in the same folder, so that rename is atomic
  int fd_ = -1;
};

/// The text as the whole file. @throws c10::Error as `OutputFile`.
void write_file(const std::filesystem::path& path, std::string_view text);

/// @throws c10::Error if it is not there and can't be made.
void make_folder(const std::filesystem::path& folder);

}  // namespace attn::weights
