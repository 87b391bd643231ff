#include "weights/safetensors.h"

#include "json.h"
#include "weights/in_quotes.h"

#include <ATen/Functions.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace attn::weights {
namespace {

using nlohmann::json;

constexpr size_t kLengthSize = sizeof(uint64_t);
constexpr size_t kLongestHeader = 100'000'000;  // the Python library's own limit
constexpr const char* kMetadataKey = "__metadata__";

struct NamedType {
  std::string_view name;
  at::ScalarType type;
};

// In the order of the Python library's enumeration: files hold the last of them first.
constexpr std::array kTypes = {
    NamedType{"BOOL", at::kBool},
    NamedType{"U8", at::kByte},
    NamedType{"I8", at::kChar},
    NamedType{"F8_E5M2", at::kFloat8_e5m2},
    NamedType{"F8_E4M3", at::kFloat8_e4m3fn},
    NamedType{"I16", at::kShort},
    NamedType{"U16", at::kUInt16},
    NamedType{"F16", at::kHalf},
    NamedType{"BF16", at::kBFloat16},
    NamedType{"I32", at::kInt},
    NamedType{"U32", at::kUInt32},
    NamedType{"F32", at::kFloat},
    NamedType{"C64", at::kComplexFloat},
    NamedType{"F64", at::kDouble},
    NamedType{"I64", at::kLong},
    NamedType{"U64", at::kUInt64},
};

// --- Reading

struct Entry {
  std::string name;
  at::ScalarType type;
  std::vector<int64_t> shape;
  uint64_t begin, end;  // in the data
};

/// The file's name and the tensor's, for messages.
struct Place {
  const std::string& file;
  const std::string& tensor;
};

std::ostream& operator<<(std::ostream& out, const Place& place) {
  return out << place.file << ": tensor " << in_quotes(place.tensor) << ": ";
}

const json& member(const json& object, const char* key, const Place& place) {
  const auto found = object.find(key);
  TORCH_CHECK_VALUE(found != object.end(), place, "must have ", key, ", got none");
  return *found;
}

at::ScalarType type_of(const json& value, const Place& place) {
  TORCH_CHECK_VALUE(value.is_string(), place, "dtype must be a string, got ", value.type_name());
  const auto& name = value.get_ref<const std::string&>();
  const auto* found = std::find_if(kTypes.begin(), kTypes.end(),
                                   [&](const NamedType& type) { return type.name == name; });
  TORCH_CHECK_VALUE(found != kTypes.end(), place,
                    "dtype must be one that PyTorch has (as F32), got ", in_quotes(name));
  return found->type;
}

std::vector<uint64_t> unsigned_list(const json& value, const char* key, const Place& place) {
  TORCH_CHECK_VALUE(value.is_array(), place, key, " must be a list, got ", value.type_name());
  std::vector<uint64_t> list;
  list.reserve(value.size());
  for (const auto& element : value) {
    TORCH_CHECK_VALUE(element.is_number_unsigned(), place, key,
                      " must hold integers from 0 to 2^64 - 1, got ", in_quotes(element.dump()));
    list.push_back(element.get<uint64_t>());
  }
  return list;
}

Entry entry_of(const std::string& name, const json& value, const std::string& file) {
  const Place place{file, name};
  TORCH_CHECK_VALUE(value.is_object(), place, "must be a JSON object, got ", value.type_name());
  Entry entry{name, type_of(member(value, "dtype", place), place), {}, 0, 0};

  // Lengths of zero count as one here: strides are computed from the others even so.
  uint64_t extent = c10::elementSize(entry.type);
  bool empty = false;
  for (const auto length : unsigned_list(member(value, "shape", place), "shape", place)) {
    const bool overflows = __builtin_mul_overflow(extent, std::max(length, uint64_t{1}), &extent);
    TORCH_CHECK_VALUE(!overflows && extent <= std::numeric_limits<int64_t>::max(), place,
                      "shape must be of a tensor below 2^63 bytes, got a larger one");
    empty |= length == 0;
    entry.shape.push_back(static_cast<int64_t>(length));
  }
  const uint64_t size = empty ? 0 : extent;
  const auto offsets = unsigned_list(member(value, "data_offsets", place), "data_offsets", place);
  TORCH_CHECK_VALUE(offsets.size() == 2, place, "data_offsets must be two numbers, got ",
                    offsets.size());
  entry.begin = offsets[0];
  entry.end = offsets[1];
  TORCH_CHECK_VALUE(entry.begin <= entry.end && entry.end - entry.begin == size, place,
                    "data_offsets must span the ", size, " bytes of dtype and shape, got ",
                    entry.begin, " to ", entry.end);
  return entry;
}

std::map<std::string, std::string> metadata_of(const json& value, const std::string& file) {
  TORCH_CHECK_VALUE(value.is_object(), file, ": ", kMetadataKey, " must be a JSON object, got ",
                    value.type_name());
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    TORCH_CHECK_VALUE(text.is_string(), file, ": ", kMetadataKey, " must hold strings, got ",
                      text.type_name(), " under ", in_quotes(key));
    metadata.emplace(key, text.get<std::string>());
  }
  return metadata;
}

// Entries in the order of their bytes, which must be all of the data: no overlap, no gap.
void sort_and_check(std::vector<Entry>& entries, uint64_t data_size, const std::string& file) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  uint64_t expected = 0;
  for (const auto& entry : entries) {
    TORCH_CHECK_VALUE(entry.begin == expected, Place{file, entry.name},
                      "data_offsets must begin where the tensor before ends (", expected, "), got ",
                      entry.begin);
    TORCH_CHECK_VALUE(entry.end <= data_size, Place{file, entry.name},
                      "data_offsets must lie in the ", data_size, " bytes of data, got ",
                      entry.begin, " to ", entry.end, "; the file may be truncated");
    expected = entry.end;
  }
  TORCH_CHECK_VALUE(expected == data_size, file, ": the tensors must be all of the ", data_size,
                    " bytes of data, got ", expected);
}

Tensor tensor_of(const Entry& entry, const std::shared_ptr<const MappedFile>& file,
                 size_t data_begin) {
  const auto options = at::dtype(entry.type);
  const size_t offset = data_begin + entry.begin, size = entry.end - entry.begin;
  if (size == 0) return at::empty(entry.shape, options);
  TORCH_CHECK_VALUE(entry.type != at::kBool || holds_bools(file->bytes().substr(offset, size)),
                    Place{file->name(), entry.name}, "bools must be 0 or 1, got another byte");
  const auto storage = alias_or_copy(file, offset, size, c10::elementSize(entry.type));
  return at::empty({0}, options).set_(storage, 0, entry.shape);
}

// A name that the metadata call another name of a tensor in the file.
void add_aliases(Safetensors& content) {
  for (const auto& [alias, kept] : content.metadata) {
    const auto* tensor = content.tensors.find(kept);
    if (tensor != nullptr && !content.tensors.contains(alias)) {
      content.tensors.insert(alias, Tensor(*tensor));
    }
  }
}

uint64_t header_size_of(const MappedFile& file) {
  uint64_t size = 0;
  std::memcpy(&size, file.data(), kLengthSize);
  return size;
}

// --- Writing

const NamedType& safetensors_type(const Tensor& tensor, const Place& place) {
  const auto* found = std::find_if(kTypes.begin(), kTypes.end(), [&](const NamedType& type) {
    return type.type == tensor.scalar_type();
  });
  TORCH_CHECK_VALUE(found != kTypes.end(), place, "dtype must be one that safetensors has, got ",
                    tensor.scalar_type());
  return *found;
}

// Two names of one tensor, as a tied model's state_dict has them.
bool same_tensor(const Tensor& a, const Tensor& b) {
  return a.numel() > 0 && a.is_alias_of(b) && a.storage_offset() == b.storage_offset() &&
         a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

struct Written {
  std::string name;
  Tensor tensor;
  const NamedType* type;
};

// What goes into the file; of several names of one tensor the first, the others become metadata.
std::vector<Written> without_aliases(const StateDict& state,
                                     std::map<std::string, std::string>& metadata,
                                     const std::string& file) {
  std::vector<Written> kept;
  std::multimap<const void*, size_t> by_storage;
  for (const auto& item : state) {
    const auto& tensor = item.value();
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto [first, last] = by_storage.equal_range(storage);
    const auto original = std::find_if(first, last, [&](const auto& other) {
      return same_tensor(tensor, kept[other.second].tensor);
    });
    if (original != last) {
      metadata.emplace(item.key(), kept[original->second].name);
      continue;
    }
    by_storage.emplace(storage, kept.size());
    kept.push_back({item.key(), tensor, &safetensors_type(tensor, Place{file, item.key()})});
  }
  return kept;
}

std::string json_text(const json& value, const std::string& file) {
  try {
    return value.dump();
  } catch (const json::exception&) {
    TORCH_CHECK_VALUE(false, file, ": names and metadata must be UTF-8, got ",
                      in_quotes(value.dump(-1, ' ', false, json::error_handler_t::replace)));
  }
}

std::string header_of(const std::vector<Written>& tensors,
                      const std::map<std::string, std::string>& metadata, const std::string& file) {
  std::ostringstream out;
  out << '{' << json_text(kMetadataKey, file) << ':' << json_text(metadata, file);
  size_t offset = 0;
  for (const auto& [name, tensor, type] : tensors) {
    const size_t end = offset + tensor.nbytes();
    out << ',' << json_text(name, file) << R"(:{"dtype":")" << type->name << R"(","shape":)"
        << json(tensor.sizes().vec()) << R"(,"data_offsets":)" << json({offset, end}) << '}';
    offset = end;
  }
  out << '}';
  std::string header = out.str();
  header.resize((header.size() + 7) / 8 * 8, ' ');  // the data begins aligned
  return header;
}

}  // namespace

bool looks_like_safetensors(const MappedFile& file) {
  return file.size() > kLengthSize && header_size_of(file) <= file.size() - kLengthSize &&
         file.bytes()[kLengthSize] == '{';
}

Safetensors read_safetensors(const std::shared_ptr<const MappedFile>& file) {
  const auto& name = file->name();
  TORCH_CHECK_VALUE(file->size() >= kLengthSize, name,
                    ": a safetensors file must have at least 8 bytes, got ", file->size());
  const uint64_t header_size = header_size_of(*file);
  TORCH_CHECK_VALUE(header_size <= file->size() - kLengthSize, name,
                    ": the safetensors header must lie in the file's ", file->size(),
                    " bytes, got a length of ", header_size, "; the file may be truncated");
  TORCH_CHECK_VALUE(header_size <= kLongestHeader, name,
                    ": the safetensors header must be at most ", kLongestHeader, " bytes, got ",
                    header_size);
  const auto header = parse_json(file->bytes().substr(kLengthSize, header_size), name);
  TORCH_CHECK_VALUE(header.is_object(), name,
                    ": the safetensors header must be a JSON object, got ", header.type_name());

  Safetensors content;
  std::vector<Entry> entries;
  entries.reserve(header.size());
  for (const auto& [key, value] : header.items()) {
    if (key == kMetadataKey) {
      content.metadata = metadata_of(value, name);
    } else {
      entries.push_back(entry_of(key, value, name));
    }
  }
  const size_t data_begin = kLengthSize + header_size;
  sort_and_check(entries, file->size() - data_begin, name);
  content.tensors.reserve(entries.size());
  for (const auto& entry : entries) {
    content.tensors.insert(entry.name, tensor_of(entry, file, data_begin));
  }
  add_aliases(content);
  return content;
}

void write_safetensors(const StateDict& state, const std::map<std::string, std::string>& metadata,
                       OutputFile& file) {
  auto all_metadata = metadata;
  all_metadata.emplace("format", "pt");
  auto tensors = without_aliases(state, all_metadata, file.name());
  std::sort(tensors.begin(), tensors.end(), [](const Written& a, const Written& b) {
    return a.type != b.type ? a.type > b.type : a.name < b.name;
  });
  TORCH_CHECK_VALUE(!state.contains(kMetadataKey), file.name(), ": no tensor must be called ",
                    kMetadataKey, ", got one");

  const auto header = header_of(tensors, all_metadata, file.name());
  const uint64_t size = header.size();
  file.write(&size, sizeof size);
  file.write(header.data(), header.size());
  for (const auto& [name, tensor, type] : tensors) {
    const auto values = tensor.to(at::kCPU).resolve_conj().resolve_neg().contiguous();
    file.write(values.const_data_ptr(), values.nbytes());
  }
}

}  // namespace attn::weights
