#pragma once

// Attention of new tokens over a cache, and where in the sequence those tokens stand.

#include <attn/functional.h>
#include <attn/kv_cache.h>

namespace attn {

/// qkv [B, T, 3C] -> [B, T, C]: appends the keys and values to the layer, and attends to all that
/// it then holds. Without a layer: `packed_self_attention`.
Tensor cached_self_attention(const Tensor& qkv, int64_t n_head,
                             const functional::AttentionOptions& options, KVCache::Layer* cache);

/// How many tokens the cache holds; 0 without one.
inline int64_t cached_length(const KVCache::Layer* cache) {
  return cache == nullptr ? 0 : cache->length();
}
inline int64_t cached_length(const KVCache* cache) {
  return cache == nullptr ? 0 : cache->length();
}

/// Positions of the last T of S tokens, counted over those that are no padding: key_padding_mask
/// [B, S] -> int64 [B, T]. Padding itself stands at 0.
/// @throws c10::ValueError if the mask is not bool [B, S].
Tensor positions_without_padding(const Tensor& key_padding_mask, int64_t B, int64_t S, int64_t T);

}  // namespace attn
