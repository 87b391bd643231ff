#pragma once

#include <attn/export.h>
#include <attn/generation.h>
#include <attn/kv_cache.h>
#include <attn/modules/cloneable.h>
#include <attn/modules/embedding.h>
#include <attn/modules/multi_head_self_attention.h>

#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace attn {

/// Options of `TinyAttentionLM`.
struct ATTN_API TinyAttentionLMOptions {
  TinyAttentionLMOptions(int64_t vocab_size, int64_t d_model, int64_t n_heads,
                         int64_t max_context_length)
      : vocab_size_(vocab_size),
        d_model_(d_model),
        n_heads_(n_heads),
        max_context_length_(max_context_length) {}

  TORCH_ARG(int64_t, vocab_size);          ///< V
  TORCH_ARG(int64_t, d_model);             ///< model width C, even
  TORCH_ARG(int64_t, n_heads);             ///< heads H; C is a multiple of it
  TORCH_ARG(int64_t, max_context_length);  ///< longest T that forward accepts
  TORCH_ARG(bool, causal) = true;
  TORCH_ARG(Implementation, implementation) = Implementation::automatic;
};

/// The smallest language model: embeddings, one attention, a linear head; no residual, no norm
/// (seed 2).
///
/// @code
/// attn::TinyAttentionLM model(/*vocab_size=*/64, /*d_model=*/32, /*n_heads=*/4,
///                             /*max_context_length=*/12);
/// auto [logits, weights] = model->forward_with_weights(torch::randint(0, 64, {2, 12}));
/// // logits [2, 12, 64], weights [2, 4, 12, 12]
/// @endcode
class ATTN_API TinyAttentionLMImpl : public Cloneable<TinyAttentionLMImpl>, public CausalLM {
 public:
  TinyAttentionLMImpl(int64_t vocab_size, int64_t d_model, int64_t n_heads,
                      int64_t max_context_length)
      : TinyAttentionLMImpl(
            TinyAttentionLMOptions(vocab_size, d_model, n_heads, max_context_length)) {}
  /// @throws c10::ValueError as its parts: sizes below 1, odd d_model, d_model not a multiple of
  /// n_heads.
  explicit TinyAttentionLMImpl(const TinyAttentionLMOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// ids [B, T], each in [0, V) -> logits [B, T, V]; key_padding_mask [B, T] bool, true = padding:
  /// positions are then counted over the tokens that are none, so that it may be on either side.
  /// With a cache, ids are the new tokens only, the mask is [B, S], and T counts the cached ones.
  /// @throws c10::ValueError if ids are not integral, not 2-D or out of range, or
  /// T > max_context_length.
  Tensor forward(const Tensor& ids, const Tensor& key_padding_mask = {}, KVCache* cache = nullptr);

  /// As `forward`, with the attention weights: ([B, T, V], [B, H, T, T]).
  std::tuple<Tensor, Tensor> forward_with_weights(const Tensor& ids,
                                                  const Tensor& key_padding_mask = {});

  Tensor last_logits(const Tensor& ids, const Tensor& key_padding_mask, KVCache* cache) override;
  KVCache make_cache(int64_t batch, int64_t capacity) const override;
  int64_t vocab_size() const override { return options.vocab_size(); }
  int64_t context_length() const override { return options.max_context_length(); }
  torch::nn::Module* module() override { return this; }

  TinyAttentionLMOptions options;
  TokenEmbedding token_emb{nullptr};
  SinusoidalPositionalEmbedding pos_emb{nullptr};
  MultiHeadSelfAttention attn{nullptr};
  torch::nn::Linear lm_head{nullptr};  ///< [C] -> [V]

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Tensor())},
                           {2, torch::nn::AnyValue(static_cast<KVCache*>(nullptr))})

 private:
  // [B, T] -> [B, T, C]
  Tensor embed(const Tensor& ids, const Tensor& key_padding_mask, int64_t cached);
  Tensor attend(const Tensor& ids, const Tensor& key_padding_mask, KVCache* cache);
};
TORCH_MODULE(TinyAttentionLM);

}  // namespace attn
