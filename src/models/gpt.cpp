#include "attn/models/gpt.h"

#include "cached_attention.h"
#include "checks.h"
#include "linear.h"
#include "modules/run_blocks.h"
#include "printing.h"

#include <torch/nn/init.h>

#include <cmath>

namespace attn {
namespace {

constexpr double kInitialDeviation = 0.02;  // GPT-2's

// The reference's `apply(_init_weights)`: children before their parents, in order of registration.
void draw_weights(torch::nn::Module& module) {
  for (const auto& child : module.children()) draw_weights(*child);
  if (auto* linear = module.as<torch::nn::LinearImpl>()) {
    torch::nn::init::normal_(linear->weight, 0.0, kInitialDeviation);
    if (linear->bias.defined()) torch::nn::init::zeros_(linear->bias);
  } else if (auto* embedding = module.as<torch::nn::EmbeddingImpl>()) {
    torch::nn::init::normal_(embedding->weight, 0.0, kInitialDeviation);
  }
}

}  // namespace

BlockOptions GPTOptions::block() const {
  return BlockOptions()
      .d_model(d_model())
      .num_heads(num_heads())
      .context_length(context_length())
      .mlp_expansion(mlp_expansion())
      .attn_dropout(dropout())
      .residual_dropout(dropout())
      .use_bias(use_bias())
      .pre_ln(true)
      .layer_norm_eps(layer_norm_eps())
      .activation(activation())
      .causal(true)
      .implementation(implementation());
}

GPTImpl::GPTImpl(const GPTOptions& options_) : options(options_) {
  check_positive("vocab_size", options.vocab_size());
  check_positive("context_length", options.context_length());
  check_positive("d_model", options.d_model());
  check_positive("num_heads", options.num_heads());
  check_multiple("d_model", options.d_model(), "num_heads", options.num_heads());
  check_positive("num_layers", options.num_layers());
  check_positive("mlp_expansion", options.mlp_expansion());
  check_probability("dropout", options.dropout());
  reset();
}

void GPTImpl::reset() {
  const int64_t V = options.vocab_size(), C = options.d_model();
  tok_embed = register_module("tok_embed", torch::nn::Embedding(V, C));
  pos_embed = register_module("pos_embed", torch::nn::Embedding(options.context_length(), C));
  embed_dropout = register_module("embed_dropout", torch::nn::Dropout(options.dropout()));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < options.num_layers(); ++i)
    blocks->push_back(TransformerBlock(options.block()));
  final_ln =
      register_module("final_ln", LayerNorm(LayerNormOptions(C).eps(options.layer_norm_eps())));
  // Drawn even when tied: the reference makes the head and then replaces its weight.
  const torch::nn::Linear head(torch::nn::LinearOptions(C, V).bias(false));
  lm_head = options.weight_tying() ? torch::nn::Linear(nullptr) : register_module("lm_head", head);

  draw_weights(*this);
  if (options.weight_tying()) {
    torch::nn::init::normal_(tok_embed->weight, 0.0, kInitialDeviation);  // again, as the head
  }
  const torch::NoGradGuard no_grad;
  const double depth = 1.0 / std::sqrt(2.0 * static_cast<double>(options.num_layers()));
  for (const auto& block : *blocks) {
    const auto* parts = block->as<TransformerBlockImpl>();
    parts->attn->out_proj->weight.mul_(depth);
    parts->mlp->fc2->weight.mul_(depth);
  }
}

void GPTImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::GPT(vocab_size=" << options.vocab_size()
         << ", context_length=" << options.context_length() << ", d_model=" << options.d_model()
         << ", num_heads=" << options.num_heads() << ", num_layers=" << options.num_layers()
         << ", dropout=" << options.dropout() << ", weight_tying=" << yes_no(options.weight_tying())
         << ")";
}

std::vector<std::pair<std::string, std::string>> GPTImpl::tied_weights() const {
  if (!options.weight_tying()) return {};
  return {{"lm_head.weight", "tok_embed.weight"}};
}

const Tensor& GPTImpl::head_weight() const {
  return lm_head.is_empty() ? tok_embed->weight : lm_head->weight;
}

Tensor GPTImpl::forward_features(const Tensor& ids, const Tensor& key_padding_mask,
                                 KVCache* cache) {
  check_token_sequences(ids, options.vocab_size());
  const int64_t B = ids.size(0), T = ids.size(1), cached = cached_length(cache);
  check_length(cached + T, "context_length", options.context_length());
  const auto places =
      key_padding_mask.defined()
          ? pos_embed(positions_without_padding(key_padding_mask, B, cached + T, T))  // [B, T, C]
          : pos_embed->weight.narrow(0, cached, T);                                   // [T, C]
  const auto x = embed_dropout(tok_embed(ids) + places);                              // [B, T, C]
  return final_ln(run_blocks(*blocks, x, key_padding_mask, cache));
}

Tensor GPTImpl::logits(const Tensor& h) {
  check_width(h, "d_model", options.d_model());
  return apply_linear(h, head_weight(), {});  // [..., V]
}

Tensor GPTImpl::forward(const Tensor& ids, const Tensor& key_padding_mask, KVCache* cache) {
  return logits(forward_features(ids, key_padding_mask, cache));  // [B, T, V]
}

Tensor GPTImpl::last_logits(const Tensor& ids, const Tensor& key_padding_mask, KVCache* cache) {
  check_some_tokens(ids);
  return logits(forward_features(ids, key_padding_mask, cache).select(1, -1));  // [B, V]
}

KVCache GPTImpl::make_cache(int64_t batch, int64_t capacity) const {
  return KVCache(KVCacheOptions(options.num_layers(), batch, options.num_heads(),
                                options.d_model() / options.num_heads(), capacity)
                     .dtype(tok_embed->weight.scalar_type())
                     .device(tok_embed->weight.device()));
}

}  // namespace attn
