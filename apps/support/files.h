#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace apps {

/// The first `limit` bytes of a file or pipe.
/// @throws std::runtime_error, one line that names the path and what is wrong with it.
std::string read_file(const std::string& path, size_t limit);

/// Fails now, not after the training, if `write_file` would fail later.
/// @throws std::runtime_error as `write_file`.
void check_writable(const std::string& path);

/// Replaces a file: written beside it, then renamed, so a reader sees the old file or the whole new
/// one. What is no regular file (a pipe, /dev/stdout) is written to directly.
/// @throws std::runtime_error, one line that names the path and what is wrong with it.
void write_file(const std::string& path, std::string_view text);

}  // namespace apps
