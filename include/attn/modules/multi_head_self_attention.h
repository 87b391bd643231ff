#pragma once

#include <attn/export.h>
#include <attn/functional.h>
#include <attn/kv_cache.h>
#include <attn/modules/cloneable.h>

#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace attn {

/// Options of `MultiHeadSelfAttention`: `MultiHeadSelfAttentionOptions(32, 4,
/// 12).attn_dropout(0.1)`.
struct ATTN_API MultiHeadSelfAttentionOptions {
  MultiHeadSelfAttentionOptions(int64_t d_model, int64_t n_heads, int64_t max_context_length)
      : d_model_(d_model), n_heads_(n_heads), max_context_length_(max_context_length) {}

  TORCH_ARG(int64_t, d_model);             ///< model width C
  TORCH_ARG(int64_t, n_heads);             ///< heads H; C is a multiple of it
  TORCH_ARG(int64_t, max_context_length);  ///< longest T that forward accepts
  TORCH_ARG(double, attn_dropout) = 0.0;   ///< of the attention weights, in [0, 1]
  TORCH_ARG(double, out_dropout) = 0.0;    ///< of the output, in [0, 1]
  TORCH_ARG(bool, causal) = true;
  TORCH_ARG(Implementation, implementation) = Implementation::automatic;
};

/// Causal multi-head self-attention with biases, dropout and a context limit (seed 2).
///
/// @code
/// attn::MultiHeadSelfAttention attention(/*d_model=*/16, /*n_heads=*/4, /*max_context_length=*/5);
/// auto [out, weights] = attention->forward_with_weights(torch::randn({2, 5, 16}));
/// // out [2, 5, 16], weights [2, 4, 5, 5]
/// @endcode
class ATTN_API MultiHeadSelfAttentionImpl : public Cloneable<MultiHeadSelfAttentionImpl> {
 public:
  MultiHeadSelfAttentionImpl(int64_t d_model, int64_t n_heads, int64_t max_context_length)
      : MultiHeadSelfAttentionImpl(
            MultiHeadSelfAttentionOptions(d_model, n_heads, max_context_length)) {}
  /// @throws c10::ValueError if a size is below 1, d_model not a multiple of n_heads, or a dropout
  /// outside [0, 1].
  explicit MultiHeadSelfAttentionImpl(const MultiHeadSelfAttentionOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// x [B, T, C] -> [B, T, C]; key_padding_mask [B, T] bool, true = padding.
  /// Where no gradient is wanted, small float32 modules on the CPU take one call instead of three,
  /// and their result equals the three calls' to rounding.
  /// A cache layer takes in the new tokens' keys and values, the mask is then [B, S], and the
  /// caller advances the cache (see KVCache).
  /// @throws c10::ValueError if x is not 3-D of width C, T > max_context_length, or the mask does
  /// not fit.
  Tensor forward(const Tensor& x, const Tensor& key_padding_mask = {},
                 KVCache::Layer* cache = nullptr);

  /// As `forward`, with the attention weights: ([B, T, C], [B, H, T, T]).
  std::tuple<Tensor, Tensor> forward_with_weights(const Tensor& x,
                                                  const Tensor& key_padding_mask = {});

  MultiHeadSelfAttentionOptions options;
  torch::nn::Linear qkv_proj{nullptr};  ///< [C] -> [3C]
  torch::nn::Linear out_proj{nullptr};  ///< [C] -> [C]
  torch::nn::Dropout attn_dropout{nullptr};
  torch::nn::Dropout out_dropout{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Tensor())},
                           {2, torch::nn::AnyValue(static_cast<KVCache::Layer*>(nullptr))})

 private:
  void check_input(const Tensor& x, int64_t cached) const;
  functional::AttentionOptions attention_options(const Tensor& key_padding_mask) const;
};
TORCH_MODULE(MultiHeadSelfAttention);

}  // namespace attn
