#include "attn/modules/multi_head_self_attention.h"

#include "cached_attention.h"
#include "checks.h"
#include "fused_attention.h"
#include "printing.h"

namespace attn {

MultiHeadSelfAttentionImpl::MultiHeadSelfAttentionImpl(
    const MultiHeadSelfAttentionOptions& options_)
    : options(options_) {
  check_positive("d_model", options.d_model());
  check_positive("n_heads", options.n_heads());
  check_positive("max_context_length", options.max_context_length());
  check_multiple("d_model", options.d_model(), "n_heads", options.n_heads());
  check_probability("attn_dropout", options.attn_dropout());
  check_probability("out_dropout", options.out_dropout());
  reset();
}

void MultiHeadSelfAttentionImpl::reset() {
  const int64_t C = options.d_model();
  qkv_proj = register_module("qkv_proj", torch::nn::Linear(C, 3 * C));
  out_proj = register_module("out_proj", torch::nn::Linear(C, C));
  attn_dropout = register_module("attn_dropout", torch::nn::Dropout(options.attn_dropout()));
  out_dropout = register_module("out_dropout", torch::nn::Dropout(options.out_dropout()));
}

void MultiHeadSelfAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::MultiHeadSelfAttention(d_model=" << options.d_model()
         << ", n_heads=" << options.n_heads()
         << ", max_context_length=" << options.max_context_length()
         << ", attn_dropout=" << options.attn_dropout() << ", out_dropout=" << options.out_dropout()
         << ", causal=" << yes_no(options.causal()) << ")";
}

void MultiHeadSelfAttentionImpl::check_input(const Tensor& x, int64_t cached) const {
  check_sequence(x, "d_model", options.d_model());
  check_length(cached + x.size(1), "max_context_length", options.max_context_length());
}

functional::AttentionOptions MultiHeadSelfAttentionImpl::attention_options(
    const Tensor& key_padding_mask) const {
  return functional::AttentionOptions()
      .causal(options.causal())
      .dropout_p(attn_dropout->is_training() ? attn_dropout->options.p() : 0.0)
      .key_padding_mask(key_padding_mask)
      .implementation(options.implementation());
}

Tensor MultiHeadSelfAttentionImpl::forward(const Tensor& x, const Tensor& key_padding_mask,
                                           KVCache::Layer* cache) {
  check_input(x, cached_length(cache));
  const auto attention = attention_options(key_padding_mask);
  if (cache == nullptr) {
    auto small = functional::small_module(
        x, {qkv_proj->weight, qkv_proj->bias, out_proj->weight, out_proj->bias}, options.n_heads(),
        attention);
    if (small.defined()) return out_dropout(small);
  }
  const auto y = cached_self_attention(qkv_proj(x), options.n_heads(), attention, cache);
  return out_dropout(out_proj(y));  // [B, T, C]
}

std::tuple<Tensor, Tensor> MultiHeadSelfAttentionImpl::forward_with_weights(
    const Tensor& x, const Tensor& key_padding_mask) {
  check_input(x, /*cached=*/0);
  const auto [y, weights] = functional::packed_self_attention_with_weights(
      qkv_proj(x), options.n_heads(), attention_options(key_padding_mask));
  return {out_dropout(out_proj(y)), weights};  // [B, T, C], [B, H, T, T]
}

}  // namespace attn
