#include "weights/pytorch_file.h"

#include "weights/in_quotes.h"
#include "weights/moved_to.h"
#include "weights/pickle.h"
#include "weights/zip_directory.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace attn::weights {
namespace {

// ---- Reading

struct StorageType {
  std::string_view storage;
  at::ScalarType type;
};
constexpr std::array kStorageTypes = {
    StorageType{"FloatStorage", at::kFloat},
    StorageType{"DoubleStorage", at::kDouble},
    StorageType{"HalfStorage", at::kHalf},
    StorageType{"BFloat16Storage", at::kBFloat16},
    StorageType{"LongStorage", at::kLong},
    StorageType{"IntStorage", at::kInt},
    StorageType{"ShortStorage", at::kShort},
    StorageType{"CharStorage", at::kChar},
    StorageType{"ByteStorage", at::kByte},
    StorageType{"BoolStorage", at::kBool},
    StorageType{"ComplexFloatStorage", at::kComplexFloat},
    StorageType{"ComplexDoubleStorage", at::kComplexDouble},
};

/// The container's records, all of which lie in one folder.
class Archive {
 public:
  explicit Archive(const std::shared_ptr<const MappedFile>& file) : file_(file) {
    const auto entries = read_zip_directory(*file);
    TORCH_CHECK_VALUE(!entries.empty(), name(), ": must hold data.pkl, got an empty zip container");
    const auto folder = entries.front().name.substr(0, entries.front().name.find('/') + 1);
    for (const auto& entry : entries) {
      if (entry.name.starts_with(folder)) records_.emplace(entry.name.substr(folder.size()), entry);
    }
    TORCH_CHECK_VALUE(find("constants.pkl") == nullptr, name(),
                      ": must be a file of torch.save(model.state_dict()), got a TorchScript "
                      "archive (or one of C++'s torch::save); load it with torch::jit::load (or "
                      "torch::load) and write its tensors with attn::save_weights");
    TORCH_CHECK_VALUE(find("data.pkl") != nullptr, name(),
                      ": must hold data.pkl, as torch.save writes it, got another zip container");
    if (const auto* order = find("byteorder"); order != nullptr) {
      TORCH_CHECK_VALUE(bytes(*order) == "little", name(), ": must be little-endian, got ",
                        in_quotes(bytes(*order)));
    }
  }

  const std::string& name() const { return file_->name(); }
  const std::shared_ptr<const MappedFile>& file() const { return file_; }
  const ZipEntry* find(const std::string& record) const {
    const auto found = records_.find(record);
    return found == records_.end() ? nullptr : &found->second;
  }
  std::string_view bytes(const ZipEntry& entry) const {
    return file_->bytes().substr(entry.offset, entry.size);
  }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::unordered_map<std::string, ZipEntry> records_;  // by name below the folder
};

/// Tensors by their place in the archive; what shares a storage there shares one here.
class TensorReader {
 public:
  explicit TensorReader(const Archive& archive) : archive_(archive) {}

  Tensor read(const std::string& name, const PickledTensor& tensor) {
    const auto* type =
        std::find_if(kStorageTypes.begin(), kStorageTypes.end(),
                     [&](const StorageType& t) { return tensor.storage->type == t.storage; });
    const auto place = archive_.name() + ": tensor " + in_quotes(name) + ": ";
    TORCH_CHECK_VALUE(type != kStorageTypes.end(), place, "dtype must be a plain one, got ",
                      tensor.storage->type);
    const auto* record = archive_.find("data/" + tensor.storage->key);
    TORCH_CHECK_VALUE(record != nullptr, place, "its storage must be in the file, got no record ",
                      tensor.storage->key);
    const auto options = at::dtype(type->type);
    const uint64_t size = c10::elementSize(type->type);
    check_extent(place, tensor, record->size / size);
    if (type->type == at::kBool && checked_.insert(tensor.storage->key).second) {
      TORCH_CHECK_VALUE(holds_bools(archive_.bytes(*record)), place,
                        "bools must be 0 or 1, got another byte");
    }
    auto result = at::empty({0}, options);
    return result.set_(storage(*record, tensor.storage->key), tensor.offset, tensor.sizes,
                       tensor.strides);
  }

 private:
  // The first element at `offset`, the last one in the storage too.
  static void check_extent(const std::string& place, const PickledTensor& tensor,
                           uint64_t elements) {
    TORCH_CHECK_VALUE(tensor.sizes.size() == tensor.strides.size(), place,
                      "must have a stride for each dimension (", tensor.sizes.size(), "), got ",
                      tensor.strides.size());
    TORCH_CHECK_VALUE(tensor.offset >= 0, place, "offset must be at least 0, got ", tensor.offset);
    uint64_t count = 1, last = static_cast<uint64_t>(tensor.offset);
    bool overflows = false;
    for (size_t i = 0; i < tensor.sizes.size(); ++i) {
      TORCH_CHECK_VALUE(tensor.sizes[i] >= 0 && tensor.strides[i] >= 0, place,
                        "sizes and strides must be at least 0, got ", tensor.sizes[i], " and ",
                        tensor.strides[i]);
      const auto length = static_cast<uint64_t>(tensor.sizes[i]);
      overflows = overflows || __builtin_mul_overflow(count, length, &count);
      uint64_t reach = 0;
      if (length > 0) {
        overflows =
            overflows ||
            __builtin_mul_overflow(length - 1, static_cast<uint64_t>(tensor.strides[i]), &reach) ||
            __builtin_add_overflow(last, reach, &last);
      }
    }
    const bool empty = count == 0 && !overflows;
    const uint64_t end = empty ? static_cast<uint64_t>(tensor.offset) : last + 1;
    TORCH_CHECK_VALUE(!overflows && end <= elements &&
                          count <= uint64_t{std::numeric_limits<int64_t>::max()} / 16,
                      place, "must lie in its storage of ", elements, " elements, got shape ",
                      at::IntArrayRef(tensor.sizes), " with strides ",
                      at::IntArrayRef(tensor.strides), " at ", tensor.offset);
  }

  c10::Storage storage(const ZipEntry& record, const std::string& key) {
    const auto found = storages_.find(key);
    if (found != storages_.end()) return found->second;
    constexpr size_t kAlignment = 16;  // the largest dtype's: one storage may serve several
    auto made = alias_or_copy(archive_.file(), record.offset, record.size, kAlignment);
    return storages_.emplace(key, std::move(made)).first->second;
  }

  const Archive& archive_;
  std::map<std::string, c10::Storage> storages_;
  std::set<std::string> checked_;  // storages of bools
};

// A dict of tensors by name, and at least one.
bool is_state_dict(const PickledValue& value) {
  const auto* dict = value.dict();
  return dict != nullptr && !dict->items.empty() &&
         std::all_of(dict->items.begin(), dict->items.end(), [](const auto& item) {
           return item.first.text() != nullptr && item.second.tensor() != nullptr;
         });
}

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const auto& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

const PickledDict& find_state_dict(const PickledValue& root, const std::string& key,
                                   const std::string& file) {
  const auto* dict = root.dict();
  TORCH_CHECK_VALUE(dict != nullptr, file, ": must hold a state_dict, got ", root.describe());
  if (!key.empty()) {
    std::vector<std::string> names;
    for (const auto& [name, value] : dict->items) {
      if (name.text() == nullptr) continue;
      if (names.size() < 20) names.push_back(in_quotes(*name.text()));
      if (*name.text() != key) continue;
      TORCH_CHECK_VALUE(value.dict() != nullptr, file, ": ", in_quotes(key),
                        " must be a state_dict, got ", value.describe());
      return *value.dict();
    }
    TORCH_CHECK_VALUE(false, file, ": the key must be one of the file's (", joined(names),
                      "), got ", in_quotes(key));
  }
  if (dict->items.empty() || is_state_dict(root)) return *dict;
  std::vector<std::string> names;
  const PickledDict* only = nullptr;
  for (const auto& [name, value] : dict->items) {
    if (name.text() == nullptr || !is_state_dict(value)) continue;
    names.push_back(in_quotes(*name.text()));
    only = value.dict();
  }
  TORCH_CHECK_VALUE(names.size() < 2, file,
                    ": the key must be given where there are several "
                    "state_dicts, got these: ",
                    joined(names));
  // Faults of the dict itself are named below when there is no better candidate.
  return only == nullptr ? *dict : *only;
}

}  // namespace

StateDict read_pytorch(const std::shared_ptr<const MappedFile>& file, const std::string& key) {
  const Archive archive(file);
  const auto pickle = read_pickle(archive.bytes(*archive.find("data.pkl")), archive.name());
  const auto& dict = find_state_dict(pickle.root, key, archive.name());
  TensorReader reader(archive);
  StateDict state("state_dict");
  for (const auto& [name, value] : dict.items) {
    TORCH_CHECK_VALUE(name.text() != nullptr, archive.name(),
                      ": a state_dict must have strings for keys, got ", name.describe());
    TORCH_CHECK_VALUE(value.tensor() != nullptr, archive.name(),
                      ": a state_dict must hold tensors, got ", value.describe(), " under ",
                      in_quotes(*name.text()));
    TORCH_CHECK_VALUE(!state.contains(*name.text()), archive.name(),
                      ": a state_dict must have each key once, got two of ",
                      in_quotes(*name.text()));
    state.insert(*name.text(), reader.read(*name.text(), *value.tensor()));
  }
  return state;
}

// ---- Writing

namespace {

bool is_writable(at::ScalarType type) {
  return std::any_of(kStorageTypes.begin(), kStorageTypes.end(),
                     [&](const StorageType& known) { return known.type == type; });
}

// The pickle names a storage's dtype once.
void check_types(const StateDict& state, const std::string& file) {
  std::map<const void*, at::ScalarType> types;
  for (const auto& item : state) {
    const auto type = item.value().scalar_type();
    TORCH_CHECK_VALUE(is_writable(type), file, ": tensor ", in_quotes(item.key()),
                      ": dtype must be one that PyTorch's files have, got ", type);
    const auto known = types.emplace(item.value().storage().unsafeGetStorageImpl(), type).first;
    TORCH_CHECK_VALUE(known->second == type, file, ": tensor ", in_quotes(item.key()),
                      ": tensors that share a storage must have one dtype (", known->second,
                      "), got ", type);
  }
}

}  // namespace

void write_pytorch(const StateDict& state, OutputFile& file) {
  check_types(state, file.name());
  c10::Dict<std::string, Tensor> dict;
  for (const auto& item : moved_to(state, at::kCPU)) dict.insert(item.key(), item.value());
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* data, size_t size) { pickle.append(data, size); },
                              nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();

  // LibTorch's writer prints when its sink fails, so it never learns; the failure is thrown after
  // it.
  std::exception_ptr failure;
  {
    caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
      try {
        if (!failure) file.write(data, size);
      } catch (...) {
        failure = std::current_exception();
      }
      return size;
    });
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    const auto& tensors = pickler.tensorData();  // one for each storage
    for (size_t i = 0; i < tensors.size() && !failure; ++i) {
      const auto& storage = tensors[i].storage();
      writer.writeRecord("data/" + std::to_string(i), storage.data(), storage.nbytes());
    }
    const std::string order = "little";
    writer.writeRecord("byteorder", order.data(), order.size());
    writer.writeEndOfFile();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace attn::weights
