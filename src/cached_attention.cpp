#include "cached_attention.h"

#include "math_attention.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

namespace attn {

Tensor cached_self_attention(const Tensor& qkv, int64_t n_head,
                             const functional::AttentionOptions& options, KVCache::Layer* cache) {
  if (cache == nullptr) return functional::packed_self_attention(qkv, n_head, options);
  TORCH_CHECK_VALUE(options.causal(),
                    "a cache must be used with causal attention, got causal = false");
  const auto [q, k, v] = functional::unpack_heads(qkv, n_head);  // [B, H, T, D]
  const auto [keys, values] = cache->append(k, v);               // [B, H, S, D]
  return functional::merge_heads(functional::attention(q, keys, values, options));
}

Tensor positions_without_padding(const Tensor& key_padding_mask, int64_t B, int64_t S, int64_t T) {
  const auto& mask = key_padding_mask;
  TORCH_CHECK_VALUE(mask.scalar_type() == at::kBool, "key_padding_mask must be bool, got ",
                    mask.scalar_type());
  TORCH_CHECK_VALUE(mask.dim() == 2 && mask.size(0) == B && mask.size(1) == S,
                    "key_padding_mask must be [B, S] ([", B, ", ", S, "]), got shape ",
                    mask.sizes());
  return mask.logical_not().cumsum(1).sub_(1).clamp_min_(0).narrow(1, S - T, T);
}

}  // namespace attn
