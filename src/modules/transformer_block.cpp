#include "attn/modules/transformer_block.h"

#include "checks.h"
#include "printing.h"

namespace attn {
namespace {

LayerNorm layer_norm(const BlockOptions& options) {
  return LayerNorm(LayerNormOptions(options.d_model()).eps(options.layer_norm_eps()));
}

}  // namespace

TransformerBlockImpl::TransformerBlockImpl(const BlockOptions& options_) : options(options_) {
  reset();
}

void TransformerBlockImpl::reset() {
  ln1 = register_module("ln1", layer_norm(options));
  attn = register_module("attn", MultiHeadAttention(options));
  ln2 = register_module("ln2", layer_norm(options));
  mlp = register_module("mlp", FeedForward(options));
}

void TransformerBlockImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::TransformerBlock(d_model=" << options.d_model()
         << ", num_heads=" << options.num_heads() << ", context_length=" << options.context_length()
         << ", pre_ln=" << yes_no(options.pre_ln()) << ")";
}

Tensor TransformerBlockImpl::forward(const Tensor& x, const Tensor& key_padding_mask) {
  if (options.pre_ln()) {
    const auto h = x + attn(ln1(x), key_padding_mask);  // [B, T, C]
    return h + mlp(ln2(h));
  }
  const auto h = ln1(x + attn(x, key_padding_mask));  // [B, T, C]
  return ln2(h + mlp(h));
}

BlockStackImpl::BlockStackImpl(const BlockStackOptions& options_) : options(options_) {
  check_positive("depth", options.depth());
  check_positive("vocab_size", options.vocab_size());
  check_positive("d_model", options.block().d_model());
  reset();
}

void BlockStackImpl::reset() {
  const auto& block = options.block();
  embed = register_module("embed", torch::nn::Embedding(options.vocab_size(), block.d_model()));
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < options.depth(); ++i) blocks->push_back(TransformerBlock(block));
  final_ln = register_module("final_ln", layer_norm(block));
}

void BlockStackImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::BlockStack(d_model=" << options.block().d_model()
         << ", num_heads=" << options.block().num_heads()
         << ", context_length=" << options.block().context_length() << ", depth=" << options.depth()
         << ", pre_ln=" << yes_no(options.block().pre_ln())
         << ", vocab_size=" << options.vocab_size() << ")";
}

Tensor BlockStackImpl::forward(const Tensor& ids, const Tensor& key_padding_mask) {
  check_token_sequences(ids, options.vocab_size());
  check_length(ids.size(1), "context_length", options.block().context_length());
  auto h = embed(ids);  // [B, T, C]
  for (const auto& block : *blocks) {
    h = block->as<TransformerBlockImpl>()->forward(h, key_padding_mask);
  }
  return final_ln(h);  // [B, T, C]
}

}  // namespace attn
