#pragma once

#include <attn/export.h>
#include <attn/kv_cache.h>
#include <attn/modules/cloneable.h>
#include <attn/modules/feed_forward.h>
#include <attn/modules/layer_norm.h>
#include <attn/modules/multi_head_attention.h>

#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

namespace attn {

/// Attention and feed-forward, each with a residual connection and a LayerNorm (seed 2).
///
/// pre_ln: x + attn(ln1(x)), then x + mlp(ln2(x)). Otherwise ln1(x + attn(x)), then ln2(x +
/// mlp(x)).
class ATTN_API TransformerBlockImpl : public Cloneable<TransformerBlockImpl> {
 public:
  /// @throws c10::ValueError as MultiHeadAttention, FeedForward and LayerNorm.
  explicit TransformerBlockImpl(const BlockOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// x [B, T, C] -> [B, T, C]; key_padding_mask [B, T] bool, true = padding.
  /// A cache layer takes in the new tokens' keys and values, the mask is then [B, S], and the
  /// caller advances the cache (see KVCache).
  Tensor forward(const Tensor& x, const Tensor& key_padding_mask = {},
                 KVCache::Layer* cache = nullptr);

  BlockOptions options;
  LayerNorm ln1{nullptr};
  MultiHeadAttention attn{nullptr};
  LayerNorm ln2{nullptr};
  FeedForward mlp{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Tensor())},
                           {2, torch::nn::AnyValue(static_cast<KVCache::Layer*>(nullptr))})
};
TORCH_MODULE(TransformerBlock);

/// Options of `BlockStack`: what its blocks are, and how many.
struct ATTN_API BlockStackOptions {
  BlockStackOptions(const BlockOptions& block, int64_t depth) : block_(block), depth_(depth) {}

  TORCH_ARG(BlockOptions, block);
  TORCH_ARG(int64_t, depth);             ///< number of blocks
  TORCH_ARG(int64_t, vocab_size) = 128;  ///< V, the reference's
  /// Normalise once more behind the last block. The reference always does; a stack of post-LN
  /// blocks, whose last step is a LayerNorm already, does without as BERT has it.
  TORCH_ARG(bool, final_ln) = true;
};

/// Embedding, `depth` blocks and, by default, a final LayerNorm (seed 2).
///
/// @code
/// auto options = attn::BlockOptions().d_model(128).num_heads(8).context_length(32).pre_ln(true);
/// attn::BlockStack stack(options, /*depth=*/3);
/// torch::Tensor output = stack(torch::randint(0, 128, {2, 32}));  // [2, 32, 128]
/// @endcode
class ATTN_API BlockStackImpl : public Cloneable<BlockStackImpl> {
 public:
  BlockStackImpl(const BlockOptions& block, int64_t depth)
      : BlockStackImpl(BlockStackOptions(block, depth)) {}
  /// @throws c10::ValueError if depth or vocab_size is below 1; as TransformerBlock.
  explicit BlockStackImpl(const BlockStackOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// ids [B, T], each in [0, V) -> [B, T, C]; key_padding_mask [B, T] bool, true = padding.
  /// With a cache, ids are the new tokens only, the mask is [B, S], and T counts the cached ones.
  /// @throws c10::ValueError if ids are not integral, not 2-D or out of range, or T >
  /// context_length.
  Tensor forward(const Tensor& ids, const Tensor& key_padding_mask = {}, KVCache* cache = nullptr);

  /// A cache for `batch` sequences of up to `capacity` tokens, in the weights' dtype and on their
  /// device.
  KVCache make_cache(int64_t batch, int64_t capacity) const;

  BlockStackOptions options;
  torch::nn::Embedding embed{nullptr};    ///< [V, C]
  torch::nn::ModuleList blocks{nullptr};  ///< `depth` TransformerBlocks
  LayerNorm final_ln{nullptr};            ///< empty without the option final_ln

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Tensor())},
                           {2, torch::nn::AnyValue(static_cast<KVCache*>(nullptr))})
};
TORCH_MODULE(BlockStack);

}  // namespace attn
