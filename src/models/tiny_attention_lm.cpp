#include "attn/models/tiny_attention_lm.h"

#include "cached_attention.h"
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

Tensor TinyAttentionLMImpl::embed(const Tensor& ids, const Tensor& key_padding_mask,
                                  int64_t cached) {
  check_token_sequences(ids, options.vocab_size());
  const int64_t B = ids.size(0), T = ids.size(1), S = cached + T;
  check_length(S, "max_context_length", options.max_context_length());
  if (!key_padding_mask.defined()) return token_emb(ids) + pos_emb(T, cached);  // + [T, C]
  const auto positions = positions_without_padding(key_padding_mask, B, S, T);  // [B, T]
  return token_emb(ids) + pos_emb(S).index({positions});                        // + [B, T, C]
}

Tensor TinyAttentionLMImpl::attend(const Tensor& ids, const Tensor& key_padding_mask,
                                   KVCache* cache) {
  const auto x = embed(ids, key_padding_mask, cached_length(cache));  // [B, T, C]
  if (cache == nullptr) return attn(x, key_padding_mask);
  cache->check_room(/*n_layers=*/1, ids.size(0), ids.size(1));
  const auto y = attn(x, key_padding_mask, &cache->layer(0));
  cache->advance(ids.size(1));
  return y;
}

Tensor TinyAttentionLMImpl::forward(const Tensor& ids, const Tensor& key_padding_mask,
                                    KVCache* cache) {
  return lm_head(attend(ids, key_padding_mask, cache));  // [B, T, V]
}

Tensor TinyAttentionLMImpl::last_logits(const Tensor& ids, const Tensor& key_padding_mask,
                                        KVCache* cache) {
  check_some_tokens(ids);
  return lm_head(attend(ids, key_padding_mask, cache).select(1, -1));  // [B, V]
}

KVCache TinyAttentionLMImpl::make_cache(int64_t batch, int64_t capacity) const {
  const auto& weight = lm_head->weight;
  return KVCache(KVCacheOptions(/*n_layers=*/1, batch, options.n_heads(),
                                options.d_model() / options.n_heads(), capacity)
                     .dtype(weight.scalar_type())
                     .device(weight.device()));
}

std::tuple<Tensor, Tensor> TinyAttentionLMImpl::forward_with_weights(
    const Tensor& ids, const Tensor& key_padding_mask) {
  const auto [h, weights] =
      attn->forward_with_weights(embed(ids, key_padding_mask, /*cached=*/0), key_padding_mask);
  return {lm_head(h), weights};  // [B, T, V], [B, H, T, T]
}

}  // namespace attn
