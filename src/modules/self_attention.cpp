#include "attn/modules/self_attention.h"

#include "cached_attention.h"
#include "checks.h"
#include "fused_attention.h"
#include "printing.h"

namespace attn {

SelfAttentionImpl::SelfAttentionImpl(const SelfAttentionOptions& options_) : options(options_) {
  check_positive("n_embd", options.n_embd());
  check_positive("n_head", options.n_head());
  check_multiple("n_embd", options.n_embd(), "n_head", options.n_head());
  reset();
}

void SelfAttentionImpl::reset() {
  const int64_t C = options.n_embd();
  const bool bias = options.bias();
  qkv = register_module("qkv", torch::nn::Linear(torch::nn::LinearOptions(C, 3 * C).bias(bias)));
  proj = register_module("proj", torch::nn::Linear(torch::nn::LinearOptions(C, C).bias(bias)));
}

void SelfAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::SelfAttention(n_embd=" << options.n_embd() << ", n_head=" << options.n_head()
         << ", bias=" << yes_no(options.bias()) << ", causal=" << yes_no(options.causal()) << ")";
}

functional::AttentionOptions SelfAttentionImpl::attention_options(
    const Tensor& key_padding_mask) const {
  return functional::AttentionOptions()
      .causal(options.causal())
      .key_padding_mask(key_padding_mask)
      .implementation(options.implementation());
}

Tensor SelfAttentionImpl::forward(const Tensor& x, const Tensor& key_padding_mask,
                                  KVCache::Layer* cache) {
  check_sequence(x, "n_embd", options.n_embd());
  const auto attention = attention_options(key_padding_mask);
  if (cache == nullptr) {
    auto small = functional::small_module(x, {qkv->weight, qkv->bias, proj->weight, proj->bias},
                                          options.n_head(), attention);
    if (small.defined()) return small;
  }
  const auto y = cached_self_attention(qkv(x), options.n_head(), attention, cache);
  return proj(y);  // [B, T, C]
}

std::tuple<Tensor, Tensor> SelfAttentionImpl::forward_with_weights(const Tensor& x,
                                                                   const Tensor& key_padding_mask) {
  check_sequence(x, "n_embd", options.n_embd());
  const auto [y, weights] = functional::packed_self_attention_with_weights(
      qkv(x), options.n_head(), attention_options(key_padding_mask));
  return {proj(y), weights};  // [B, T, C], [B, H, T, T]
}

}  // namespace attn
