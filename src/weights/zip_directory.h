#pragma once

// What a zip container says it holds, before any reader that trusts it opens it.

#include "weights/mapped_file.h"

#include <cstdint>
#include <string>
#include <vector>

namespace attn::weights {

struct ZipEntry {
  std::string name;
  uint64_t offset = 0;  ///< of its bytes in the file
  uint64_t size = 0;
};

/// The file begins as a zip container does.
bool looks_like_zip(const MappedFile& file);

/// Its entries, each stored as it is (PyTorch never compresses) and wholly in the file.
///
/// LibTorch's own reader inflates what it finds already when it is constructed (1 MB can be 6 GB),
/// so compressed entries, sizes beyond the file, entries that overlap and names that come twice are
/// refused here.
/// @throws c10::ValueError
std::vector<ZipEntry> read_zip_directory(const MappedFile& file);

}  // namespace attn::weights
