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

/// The non-linearity of `FeedForward`.
enum class Activation {
  gelu_tanh,  ///< GELU by tanh, as in the reference and GPT-2
  gelu,       ///< exact GELU, as in BERT
  relu,
};

/// What a transformer block and its parts are made of (the reference's BlockConfig).
///
/// @code
/// auto options = attn::BlockOptions().d_model(128).num_heads(8).context_length(32).pre_ln(true);
/// @endcode
struct ATTN_API BlockOptions {
  TORCH_ARG(int64_t, d_model) = 768;          ///< model width C
  TORCH_ARG(int64_t, num_heads) = 12;         ///< heads H; C is a multiple of it
  TORCH_ARG(int64_t, context_length) = 1024;  ///< longest T that forward accepts
  TORCH_ARG(int64_t, mlp_expansion) = 4;      ///< width of the feed-forward's inside, in C
  TORCH_ARG(double, attn_dropout) = 0.1;      ///< of the attention weights, in [0, 1]
  TORCH_ARG(double, residual_dropout) = 0.1;  ///< of both halves' outputs, in [0, 1]
  TORCH_ARG(bool, use_bias) = true;           ///< of the four linear layers
  TORCH_ARG(bool, pre_ln) = true;  ///< normalise before each half (GPT-2) or after the sum
  TORCH_ARG(double, layer_norm_eps) = 1e-5;
  TORCH_ARG(Activation, activation) = Activation::gelu_tanh;
  TORCH_ARG(bool, causal) = true;
  TORCH_ARG(Implementation, implementation) = Implementation::automatic;
};

/// The attention of a transformer block: `qkv`, attention, `out_proj`, dropout (seed 2's
/// transformer block).
class ATTN_API MultiHeadAttentionImpl : public Cloneable<MultiHeadAttentionImpl> {
 public:
  /// Reads all of the options but mlp_expansion, pre_ln, layer_norm_eps and activation.
  /// @throws c10::ValueError if a size is below 1, d_model not a multiple of num_heads, or a
  /// dropout outside [0, 1].
  explicit MultiHeadAttentionImpl(const BlockOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// x [B, T, C] -> [B, T, C]; key_padding_mask [B, T] bool, true = padding.
  /// A cache layer takes in the new tokens' keys and values, the mask is then [B, S], and the
  /// caller advances the cache (see KVCache).
  /// @throws c10::ValueError if x is not 3-D of width C, T > context_length, or the mask does not
  /// fit.
  Tensor forward(const Tensor& x, const Tensor& key_padding_mask = {},
                 KVCache::Layer* cache = nullptr);

  /// As `forward`, with the attention weights: ([B, T, C], [B, H, T, T]).
  std::tuple<Tensor, Tensor> forward_with_weights(const Tensor& x,
                                                  const Tensor& key_padding_mask = {});

  BlockOptions options;
  torch::nn::Linear qkv{nullptr};       ///< [C] -> [3C]
  torch::nn::Linear out_proj{nullptr};  ///< [C] -> [C]
  torch::nn::Dropout attn_dropout{nullptr};
  torch::nn::Dropout resid_dropout{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Tensor())},
                           {2, torch::nn::AnyValue(static_cast<KVCache::Layer*>(nullptr))})

 private:
  void check_input(const Tensor& x, int64_t cached) const;
  functional::AttentionOptions attention_options(const Tensor& key_padding_mask) const;
};
TORCH_MODULE(MultiHeadAttention);

}  // namespace attn
