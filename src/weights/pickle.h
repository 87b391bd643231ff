#pragma once

// The pickles that PyTorch's `torch.save` writes, read without running anything.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace attn::weights {

/// Elements of a storage's record, "<archive>/data/<key>".
struct PickledStorage {
  std::string key;        ///< a decimal number
  std::string_view type;  ///< of its elements, as "FloatStorage"
};

/// `_rebuild_tensor_v2`: part of a storage.
struct PickledTensor {
  std::shared_ptr<const PickledStorage> storage;
  int64_t offset = 0;  ///< in elements
  std::vector<int64_t> sizes, strides;
};

struct PickledValue;

/// A dict, OrderedDict included: keys and values in the order of insertion.
struct PickledDict {
  std::vector<std::pair<PickledValue, PickledValue>> items;
};
struct PickledList {  ///< a list, tuple or set
  std::vector<PickledValue> items;
};
struct PickledGlobal {  ///< a class or function that is known by name, never called
  std::string_view name;
};
struct PickledOpaque {  ///< None, a dtype, a device, ...: read, of no use here
  std::string_view what;
};

/// A value is a handle: a pickle can name one string or dict a million times in as many bytes.
struct PickledValue {
  std::variant<PickledOpaque, bool, int64_t, double, std::shared_ptr<const std::string>,
               PickledGlobal, std::shared_ptr<const PickledStorage>,
               std::shared_ptr<const PickledTensor>, PickledDict*, PickledList*>
      value;

  const std::string* text() const {
    const auto* found = std::get_if<std::shared_ptr<const std::string>>(&value);
    return found == nullptr ? nullptr : found->get();
  }
  const PickledTensor* tensor() const {
    const auto* found = std::get_if<std::shared_ptr<const PickledTensor>>(&value);
    return found == nullptr ? nullptr : found->get();
  }
  const PickledDict* dict() const {
    const auto* found = std::get_if<PickledDict*>(&value);
    return found == nullptr ? nullptr : *found;
  }
  const PickledList* list() const {
    const auto* found = std::get_if<PickledList*>(&value);
    return found == nullptr ? nullptr : *found;
  }
  /// What it is, for messages.
  std::string describe() const;
};

/// What a pickle holds. Its containers are owned here side by side, since a hostile file may nest
/// them without end or in a circle.
struct Pickle {
  PickledValue root;
  std::vector<std::unique_ptr<PickledDict>> dicts;
  std::vector<std::unique_ptr<PickledList>> lists;
};

/// The value that the pickle holds. Known are the opcodes of protocols 2 to 5 for plain containers,
/// numbers and strings, and by name what a state_dict or checkpoint is made of: tensors,
/// Parameters, OrderedDict, storages, dtypes, devices, torch.Size. Any other class or function is
/// refused by its name. Work and memory are bounded by the pickle's size.
/// @param file the file's name, for messages
/// @throws c10::ValueError
Pickle read_pickle(std::string_view bytes, const std::string& file);

}  // namespace attn::weights
