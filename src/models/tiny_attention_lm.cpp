#include "attn/models/tiny_attention_lm.h"

#include "checks.h"
#include "printing.h"

namespace attn {

TinyAttentionLMImpl::TinyAttentionLMImpl(const TinyAttentionLMOptions& options_)
    : options(options_) {
  reset();
}

void TinyAttentionLMImpl::reset() {
  const int64_t C = options.d_model();
  const int64_t limit = options.max_context_length();
  token_emb = register_module("token_emb", TokenEmbedding(options.vocab_size(), C));
  pos_emb = register_module("pos_emb", SinusoidalPositionalEmbedding(limit, C));
  attn = register_module(
      "attn", MultiHeadSelfAttention(MultiHeadSelfAttentionOptions(C, options.n_heads(), limit)
                                         .causal(options.causal())
                                         .implementation(options.implementation())));
  lm_head = register_module("lm_head", torch::nn::Linear(C, options.vocab_size()));
}

void TinyAttentionLMImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::TinyAttentionLM(vocab_size=" << options.vocab_size()
         << ", d_model=" << options.d_model() << ", n_heads=" << options.n_heads()
         << ", max_context_length=" << options.max_context_length()
         << ", causal=" << yes_no(options.causal()) << ")";
}

Tensor TinyAttentionLMImpl::embed(const Tensor& ids) {
  check_token_sequences(ids, options.vocab_size());
  const int64_t T = ids.size(1);
  check_length(T, "max_context_length", options.max_context_length());
  return token_emb(ids) + pos_emb(T);  // [B, T, C] + [T, C]
}

Tensor TinyAttentionLMImpl::forward(const Tensor& ids, const Tensor& key_padding_mask) {
  return lm_head(attn(embed(ids), key_padding_mask));  // [B, T, V]
}

std::tuple<Tensor, Tensor> TinyAttentionLMImpl::forward_with_weights(
    const Tensor& ids, const Tensor& key_padding_mask) {
  const auto [h, weights] = attn->forward_with_weights(embed(ids), key_padding_mask);
  return {lm_head(h), weights};  // [B, T, V], [B, H, T, T]
}

}  // namespace attn
