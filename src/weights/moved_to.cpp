#include "weights/moved_to.h"

#include <ATen/Functions.h>

#include <map>
#include <utility>

namespace attn::weights {

StateDict moved_to(const StateDict& state, c10::Device device) {
  // By storage and dtype: a whole storage as one tensor, there.
  std::map<std::pair<const void*, at::ScalarType>, Tensor> whole;
  StateDict moved("state_dict");
  for (const auto& item : state) {
    const auto tensor = item.value().detach().resolve_conj().resolve_neg();
    if (tensor.device() == device) {
      moved.insert(item.key(), tensor);
      continue;
    }
    auto& there = whole[{tensor.storage().unsafeGetStorageImpl(), tensor.scalar_type()}];
    if (!there.defined()) {
      const auto elements = tensor.storage().nbytes() / tensor.element_size();
      there = tensor.as_strided({static_cast<int64_t>(elements)}, {1}, 0).to(device);
    }
    moved.insert(item.key(),
                 there.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset()));
  }
  return moved;
}

}  // namespace attn::weights
