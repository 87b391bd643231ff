#include "weights/zip_directory.h"

#include "weights/in_quotes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

namespace attn::weights {
namespace {

// PKWARE's APPNOTE 6.3.10, sections 4.3 and 4.5.3. Everything is little-endian.
constexpr uint32_t kLocalMagic = 0x04034b50, kCentralMagic = 0x02014b50, kEndMagic = 0x06054b50,
                   kEnd64Magic = 0x06064b50, kLocator64Magic = 0x07064b50;
constexpr uint64_t kLocalSize = 30, kCentralSize = 46, kEndSize = 22, kEnd64Size = 56,
                   kLocator64Size = 20;
constexpr uint32_t kIn64 = 0xFFFFFFFF;  // the value is in the zip64 field
constexpr uint16_t kZip64Field = 0x0001;

/// Bytes of the file, read with their limits in sight.
class Reader {
 public:
  explicit Reader(const MappedFile& file) : file_(file) {}

  template <typename T>
  T at(uint64_t offset) const {
    require(offset, sizeof(T));
    T value;
    std::memcpy(&value, file_.data() + offset, sizeof(T));
    return value;
  }
  std::string_view text(uint64_t offset, uint64_t size) const {
    require(offset, size);
    return file_.bytes().substr(offset, size);
  }
  void require(uint64_t offset, uint64_t size) const {
    TORCH_CHECK_VALUE(offset <= file_.size() && size <= file_.size() - offset, file_.name(),
                      ": zip structures must lie in the file's ", file_.size(),
                      " bytes, got one of ", size, " at ", offset, "; the file may be truncated");
  }
  uint64_t size() const { return file_.size(); }
  const std::string& name() const { return file_.name(); }

 private:
  const MappedFile& file_;
};

struct Directory {
  uint64_t entries, size, offset;
};

// The last record, which a comment of up to 64 KiB may follow.
uint64_t find_end(const Reader& file) {
  TORCH_CHECK_VALUE(file.size() >= kEndSize, file.name(),
                    ": a zip container must end with its directory, got none; the file may be "
                    "truncated");
  const uint64_t last = file.size() - kEndSize;
  for (uint64_t back = 0; back <= std::min<uint64_t>(last, 0xFFFF); ++back) {
    if (file.at<uint32_t>(last - back) == kEndMagic && file.at<uint16_t>(last - back + 20) == back)
      return last - back;
  }
  TORCH_CHECK_VALUE(false, file.name(),
                    ": a zip container must end with its directory, got none; the file may be "
                    "truncated");
}

Directory find_directory(const Reader& file) {
  const uint64_t end = find_end(file);
  Directory found{file.at<uint16_t>(end + 10), file.at<uint32_t>(end + 12),
                  file.at<uint32_t>(end + 16)};
  uint64_t limit = end;
  if (end >= kLocator64Size && file.at<uint32_t>(end - kLocator64Size) == kLocator64Magic) {
    const auto end64 = file.at<uint64_t>(end - kLocator64Size + 8);
    file.require(end64, kEnd64Size);
    TORCH_CHECK_VALUE(file.at<uint32_t>(end64) == kEnd64Magic, file.name(),
                      ": the zip64 record must be where its locator points, got none at ", end64);
    const Directory wide{file.at<uint64_t>(end64 + 32), file.at<uint64_t>(end64 + 40),
                         file.at<uint64_t>(end64 + 48)};
    const auto agrees = [](uint64_t narrow, uint64_t none, uint64_t value) {
      return narrow == none || narrow == value;
    };
    TORCH_CHECK_VALUE(agrees(found.entries, 0xFFFF, wide.entries) &&
                          agrees(found.size, kIn64, wide.size) &&
                          agrees(found.offset, kIn64, wide.offset),
                      file.name(), ": the zip64 record must agree with the directory's end, got ",
                      wide.entries, " entries against ", found.entries);
    found = wide;
    limit = end64;
  }
  TORCH_CHECK_VALUE(found.offset <= limit && found.size == limit - found.offset, file.name(),
                    ": the zip directory must lie just before its end record (", limit, "), got ",
                    found.size, " bytes at ", found.offset);
  TORCH_CHECK_VALUE(found.entries <= found.size / kCentralSize, file.name(),
                    ": the zip directory must have room for its entries (", found.entries,
                    "), got ", found.size, " bytes");
  return found;
}

// A 32-bit value that says "see the zip64 field" is replaced by the next 64-bit one of it.
void widen(const Reader& file, uint64_t extra, uint64_t extra_size, uint64_t& size,
           uint64_t& packed, uint64_t& local) {
  uint64_t* wide[] = {&size, &packed, &local};
  if (std::none_of(std::begin(wide), std::end(wide), [](const auto* x) { return *x == kIn64; }))
    return;
  const uint64_t extra_end = extra + extra_size;
  while (extra + 4 <= extra_end) {
    const auto id = file.at<uint16_t>(extra);
    const uint64_t begin = extra + 4, end = begin + file.at<uint16_t>(extra + 2);
    if (id == kZip64Field) {
      uint64_t next = begin;
      for (uint64_t* value : wide) {
        if (*value != kIn64) continue;
        TORCH_CHECK_VALUE(next + 8 <= end && end <= extra_end, file.name(),
                          ": a zip64 field must hold the sizes it stands for, got a short one");
        *value = file.at<uint64_t>(next);
        next += 8;
      }
      return;
    }
    extra = end;
  }
}

// Where the bytes begin: behind a header of their own, whose name must be the directory's. miniz
// and PyTorch pad its extra field, so it is another length than the directory's.
uint64_t data_offset(const Reader& file, uint64_t local, const std::string& entry) {
  file.require(local, kLocalSize);
  TORCH_CHECK_VALUE(file.at<uint32_t>(local) == kLocalMagic, file.name(), ": zip entry ",
                    in_quotes(entry), " must begin with its header, got none at ", local);
  const uint64_t name_size = file.at<uint16_t>(local + 26);
  TORCH_CHECK_VALUE(file.text(local + kLocalSize, name_size) == entry, file.name(), ": zip entry ",
                    in_quotes(entry), " must have one name, got ",
                    in_quotes(file.text(local + kLocalSize, name_size)), " in its header");
  return local + kLocalSize + name_size + file.at<uint16_t>(local + 28);
}

void check_apart(std::vector<ZipEntry> entries, uint64_t directory, const std::string& file) {
  std::sort(entries.begin(), entries.end(),
            [](const ZipEntry& a, const ZipEntry& b) { return a.offset < b.offset; });
  uint64_t end = 0;
  for (const auto& entry : entries) {
    TORCH_CHECK_VALUE(entry.offset >= end, file, ": zip entries must not overlap, got ",
                      in_quotes(entry.name), " at ", entry.offset, " before ", end);
    end = entry.offset + entry.size;
  }
  TORCH_CHECK_VALUE(end <= directory, file, ": zip entries must end before the directory (",
                    directory, "), got ", end);
}

}  // namespace

bool looks_like_zip(const MappedFile& file) {
  uint32_t magic = 0;
  if (file.size() < sizeof magic) return false;
  std::memcpy(&magic, file.data(), sizeof magic);
  return magic == kLocalMagic || magic == kEndMagic;
}

std::vector<ZipEntry> read_zip_directory(const MappedFile& mapped) {
  const Reader file(mapped);
  const auto directory = find_directory(file);
  std::vector<ZipEntry> entries;
  entries.reserve(directory.entries);
  std::unordered_set<std::string> names;
  uint64_t at = directory.offset;
  for (uint64_t i = 0; i < directory.entries; ++i) {
    file.require(at, kCentralSize);
    TORCH_CHECK_VALUE(file.at<uint32_t>(at) == kCentralMagic, file.name(), ": zip entry ", i,
                      " must begin with its mark, got none at ", at);
    const auto flags = file.at<uint16_t>(at + 8), method = file.at<uint16_t>(at + 10);
    uint64_t packed = file.at<uint32_t>(at + 20), size = file.at<uint32_t>(at + 24),
             local = file.at<uint32_t>(at + 42);
    const uint64_t name_size = file.at<uint16_t>(at + 28), extra_size = file.at<uint16_t>(at + 30),
                   comment_size = file.at<uint16_t>(at + 32);
    ZipEntry entry;
    entry.name = std::string(file.text(at + kCentralSize, name_size));
    widen(file, at + kCentralSize + name_size, extra_size, size, packed, local);
    TORCH_CHECK_VALUE(
        method == 0 && packed == size && (flags & 1) == 0, file.name(), ": zip entry ",
        in_quotes(entry.name),
        " must be stored as it is, as torch.save writes a state_dict (TorchScript archives "
        "are another thing), got compression method ",
        method, " and ", packed, " bytes for ", size);
    entry.offset = data_offset(file, local, entry.name);
    entry.size = size;
    file.require(entry.offset, entry.size);
    TORCH_CHECK_VALUE(names.insert(entry.name).second, file.name(),
                      ": zip entries must have names of their own, got two of ",
                      in_quotes(entry.name));
    entries.push_back(std::move(entry));
    at += kCentralSize + name_size + extra_size + comment_size;
  }
  TORCH_CHECK_VALUE(at == directory.offset + directory.size, file.name(),
                    ": the zip directory must end with its last entry, got ",
                    directory.offset + directory.size, " for ", at);
  check_apart(entries, directory.offset, file.name());
  return entries;
}

}  // namespace attn::weights
