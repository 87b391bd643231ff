#pragma once

// The blocks of a model one after another, with a cache or without.

#include <attn/modules/transformer_block.h>

namespace attn {

/// x [B, T, C] through each block -> [B, T, C]. With a cache: its room is checked before the first
/// block, and its length advances after the last, so that a throw in between leaves it as it was.
Tensor run_blocks(const torch::nn::ModuleListImpl& blocks, const Tensor& x,
                  const Tensor& key_padding_mask, KVCache* cache);

}  // namespace attn
