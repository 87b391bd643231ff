#pragma once

#include <attn/export.h>
#include <attn/generation.h>
#include <attn/kv_cache.h>
#include <attn/modules/cloneable.h>
#include <attn/modules/transformer_block.h>
#include <attn/state_dict.h>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace attn {

/// Options of `GPT`, the reference's GPTConfig; the defaults are GPT-2's smallest.
struct ATTN_API GPTOptions {
  TORCH_ARG(int64_t, vocab_size) = 50257;     ///< V
  TORCH_ARG(int64_t, context_length) = 1024;  ///< longest T that forward accepts
  TORCH_ARG(int64_t, d_model) = 768;          ///< model width C
  TORCH_ARG(int64_t, num_heads) = 12;         ///< heads H; C is a multiple of it
  TORCH_ARG(int64_t, num_layers) = 12;        ///< number of blocks
  TORCH_ARG(int64_t, mlp_expansion) = 4;      ///< width of the feed-forward's inside, in C
  TORCH_ARG(double, dropout) = 0.1;           ///< all of the model's, in [0, 1]
  TORCH_ARG(bool, use_bias) = true;           ///< of the blocks' linear layers
  TORCH_ARG(bool, weight_tying) = true;       ///< the head is the token embedding
  TORCH_ARG(double, layer_norm_eps) = 1e-5;
  TORCH_ARG(Activation, activation) = Activation::gelu_tanh;
  TORCH_ARG(Implementation, implementation) = Implementation::automatic;

 public:
  static GPTOptions gpt2() { return {}; }  ///< 124 million parameters
  static GPTOptions gpt2_medium() {        ///< 355 million
    return GPTOptions().d_model(1024).num_heads(16).num_layers(24);
  }
  static GPTOptions gpt2_large() {  ///< 774 million
    return GPTOptions().d_model(1280).num_heads(20).num_layers(36);
  }
  static GPTOptions gpt2_xl() {  ///< 1558 million
    return GPTOptions().d_model(1600).num_heads(25).num_layers(48);
  }

  /// What its blocks are made of.
  BlockOptions block() const;
};

/// A decoder-only transformer with learned positions (Radford et al. 2019, GPT-2; the reference's
/// GPTModel): embeddings, pre-LN blocks, final LayerNorm, linear head.
///
/// With weight_tying the head's weight is the token embedding's: it is registered, counted and
/// trained once, and `state_dict` lists it under both names.
///
/// @code
/// auto options = attn::GPTOptions().vocab_size(256).context_length(64).d_model(64).num_heads(4)
///                    .num_layers(2).dropout(0.0);
/// attn::GPT model(options);
/// torch::Tensor ids = torch::randint(0, 256, {2, 9});
/// torch::Tensor logits = model(ids);  // [2, 9, 256]
/// torch::Tensor longer = attn::generate(model, ids, {.max_new_tokens = 3, .seed = 1});  // [2, 12]
/// @endcode
class ATTN_API GPTImpl : public Cloneable<GPTImpl>, public TiedWeights, public CausalLM {
 public:
  /// Draws the reference's initial weights: N(0, 0.02), biases 0, the blocks' last projections
  /// times 1 / sqrt(2 num_layers).
  /// @throws c10::ValueError if a size is below 1, d_model not a multiple of num_heads, or dropout
  /// outside [0, 1].
  explicit GPTImpl(const GPTOptions& options_ = {});

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// ids [B, T], each in [0, V) -> logits [B, T, V]; key_padding_mask [B, T] bool, true = padding:
  /// positions are then counted over the tokens that are none, so that it may be on either side.
  /// With a cache, ids are the new tokens only, the mask is [B, S], and T counts the cached ones.
  /// @throws c10::ValueError if ids are not integral, not 2-D or out of range, or
  /// T > context_length.
  Tensor forward(const Tensor& ids, const Tensor& key_padding_mask = {}, KVCache* cache = nullptr);

  /// All but the head: -> [B, T, C].
  Tensor forward_features(const Tensor& ids, const Tensor& key_padding_mask = {},
                          KVCache* cache = nullptr);
  /// The head: h [..., C] -> [..., V].
  Tensor logits(const Tensor& h);
  /// The head's weight [V, C]: `lm_head`'s, or the token embedding's when tied.
  const Tensor& head_weight() const;

  Tensor last_logits(const Tensor& ids, const Tensor& key_padding_mask, KVCache* cache) override;
  KVCache make_cache(int64_t batch, int64_t capacity) const override;
  int64_t vocab_size() const override { return options.vocab_size(); }
  int64_t context_length() const override { return options.context_length(); }
  torch::nn::Module* module() override { return this; }
  std::vector<std::pair<std::string, std::string>> tied_weights() const override;

  GPTOptions options;
  torch::nn::Embedding tok_embed{nullptr};  ///< [V, C]
  torch::nn::Embedding pos_embed{nullptr};  ///< [context_length, C]
  torch::nn::Dropout embed_dropout{nullptr};
  torch::nn::ModuleList blocks{nullptr};  ///< `num_layers` TransformerBlocks
  LayerNorm final_ln{nullptr};
  torch::nn::Linear lm_head{nullptr};  ///< [C] -> [V] without bias; null when tied

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(Tensor())},
                           {2, torch::nn::AnyValue(static_cast<KVCache*>(nullptr))})
};
TORCH_MODULE(GPT);

}  // namespace attn
