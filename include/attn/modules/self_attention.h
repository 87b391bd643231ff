#pragma once

#include <attn/export.h>
#include <attn/functional.h>
#include <attn/kv_cache.h>
#include <attn/modules/cloneable.h>

#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace attn {

/// Options of `SelfAttention`: `SelfAttentionOptions(8, 2).causal(false)`.
struct ATTN_API SelfAttentionOptions {
  SelfAttentionOptions(int64_t n_embd, int64_t n_head) : n_embd_(n_embd), n_head_(n_head) {}

  TORCH_ARG(int64_t, n_embd);  ///< model width C
  TORCH_ARG(int64_t, n_head);  ///< heads H; C is a multiple of it
  TORCH_ARG(bool, bias) = false;
  TORCH_ARG(bool, causal) = true;
  TORCH_ARG(Implementation, implementation) = Implementation::automatic;
};

/// Causal multi-head self-attention with two bias-free matrices, 4C² parameters (seed 1).
///
/// @code
/// attn::SelfAttention attention(/*n_embd=*/8, /*n_head=*/2);
/// torch::Tensor y = attention(torch::randn({1, 4, 8}));  // [1, 4, 8]
/// @endcode
class ATTN_API SelfAttentionImpl : public Cloneable<SelfAttentionImpl> {
 public:
  SelfAttentionImpl(int64_t n_embd, int64_t n_head)
      : SelfAttentionImpl(SelfAttentionOptions(n_embd, n_head)) {}
  /// @throws c10::ValueError if n_embd or n_head is below 1, or n_embd not a multiple of n_head.
  explicit SelfAttentionImpl(const SelfAttentionOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// x [B, T, C] -> [B, T, C]; key_padding_mask [B, T] bool, true = padding.
  /// Where no gradient is wanted, small float32 modules on the CPU take one call instead of three,
  /// and their result equals the three calls' to rounding.
  /// A cache layer takes in the new tokens' keys and values, the mask is then [B, S], and the
  /// caller advances the cache (see KVCache).
  /// @throws c10::ValueError if x is not 3-D of width C, or the mask does not fit.
  Tensor forward(const Tensor& x, const Tensor& key_padding_mask = {},
                 KVCache::Layer* cache = nullptr);

  /// As `forward`, with the attention weights: ([B, T, C], [B, H, T, T]).
  std::tuple<Tensor, Tensor> forward_with_weights(const Tensor& x,
                                                  const Tensor& key_padding_mask = {});

  SelfAttentionOptions options;
  torch::nn::Linear qkv{nullptr};   ///< [C] -> [3C]
  torch::nn::Linear proj{nullptr};  ///< [C] -> [C]

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Tensor())},
                           {2, torch::nn::AnyValue(static_cast<KVCache::Layer*>(nullptr))})

 private:
  functional::AttentionOptions attention_options(const Tensor& key_padding_mask) const;
};
TORCH_MODULE(SelfAttention);

}  // namespace attn
