#include "attn/modules/multi_head_attention.h"

#include "cached_attention.h"
#include "checks.h"
#include "linear.h"
#include "printing.h"

namespace attn {

MultiHeadAttentionImpl::MultiHeadAttentionImpl(const BlockOptions& options_) : options(options_) {
  check_positive("d_model", options.d_model());
  check_positive("num_heads", options.num_heads());
  check_positive("context_length", options.context_length());
  check_multiple("d_model", options.d_model(), "num_heads", options.num_heads());
  check_probability("attn_dropout", options.attn_dropout());
  check_probability("residual_dropout", options.residual_dropout());
  reset();
}

void MultiHeadAttentionImpl::reset() {
  const int64_t C = options.d_model();
  const bool bias = options.use_bias();
  qkv = register_module("qkv", torch::nn::Linear(torch::nn::LinearOptions(C, 3 * C).bias(bias)));
  out_proj =
      register_module("out_proj", torch::nn::Linear(torch::nn::LinearOptions(C, C).bias(bias)));
  attn_dropout = register_module("attn_dropout", torch::nn::Dropout(options.attn_dropout()));
  resid_dropout = register_module("resid_dropout", torch::nn::Dropout(options.residual_dropout()));
}

void MultiHeadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::MultiHeadAttention(d_model=" << options.d_model()
         << ", num_heads=" << options.num_heads() << ", context_length=" << options.context_length()
         << ", attn_dropout=" << options.attn_dropout()
         << ", residual_dropout=" << options.residual_dropout()
         << ", use_bias=" << yes_no(options.use_bias()) << ", causal=" << yes_no(options.causal())
         << ")";
}

void MultiHeadAttentionImpl::check_input(const Tensor& x, int64_t cached) const {
  check_sequence(x, "d_model", options.d_model());
  check_length(cached + x.size(1), "context_length", options.context_length());
}

functional::AttentionOptions MultiHeadAttentionImpl::attention_options(
    const Tensor& key_padding_mask) const {
  return functional::AttentionOptions()
      .causal(options.causal())
      .dropout_p(attn_dropout->is_training() ? attn_dropout->options.p() : 0.0)
      .key_padding_mask(key_padding_mask)
      .implementation(options.implementation());
}

Tensor MultiHeadAttentionImpl::forward(const Tensor& x, const Tensor& key_padding_mask,
                                       KVCache::Layer* cache) {
  check_input(x, cached_length(cache));
  const auto y = cached_self_attention(apply_linear(x, qkv->weight, qkv->bias), options.num_heads(),
                                       attention_options(key_padding_mask), cache);
  return resid_dropout(apply_linear(y, out_proj->weight, out_proj->bias));  // [B, T, C]
}

std::tuple<Tensor, Tensor> MultiHeadAttentionImpl::forward_with_weights(
    const Tensor& x, const Tensor& key_padding_mask) {
  check_input(x, /*cached=*/0);
  const auto [y, weights] = functional::packed_self_attention_with_weights(
      qkv(x), options.num_heads(), attention_options(key_padding_mask));
  return {resid_dropout(out_proj(y)), weights};  // [B, T, C], [B, H, T, T]
}

}  // namespace attn
