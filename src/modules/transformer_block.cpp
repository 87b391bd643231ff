#include "attn/modules/transformer_block.h"

#include "cached_attention.h"
#include "checks.h"
#include "modules/run_blocks.h"
#include "printing.h"

namespace attn {
namespace {

LayerNorm layer_norm(const BlockOptions& options) {
  return LayerNorm(LayerNormOptions(options.d_model()).eps(options.layer_norm_eps()));
}

}  // namespace

Tensor run_blocks(const torch::nn::ModuleListImpl& blocks, const Tensor& x,
                  const Tensor& key_padding_mask, KVCache* cache) {
  const int64_t T = x.size(1);
  if (cache != nullptr) cache->check_room(static_cast<int64_t>(blocks.size()), x.size(0), T);
  auto h = x;  // [B, T, C]
  int64_t i = 0;
  for (const auto& block : blocks) {
    h = block->as<TransformerBlockImpl>()->forward(h, key_padding_mask,
                                                   cache == nullptr ? nullptr : &cache->layer(i++));
  }
  if (cache != nullptr) cache->advance(T);
  return h;
}

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

Tensor TransformerBlockImpl::forward(const Tensor& x, const Tensor& key_padding_mask,
                                     KVCache::Layer* cache) {
  if (options.pre_ln()) {
    const auto h = x + attn(ln1(x), key_padding_mask, cache);  // [B, T, C]
    return h + mlp(ln2(h));
  }
  const auto h = ln1(x + attn(x, key_padding_mask, cache));  // [B, T, C]
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
  final_ln = nullptr;
  if (options.final_ln()) final_ln = register_module("final_ln", layer_norm(block));
}

void BlockStackImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::BlockStack(d_model=" << options.block().d_model()
         << ", num_heads=" << options.block().num_heads()
         << ", context_length=" << options.block().context_length() << ", depth=" << options.depth()
         << ", pre_ln=" << yes_no(options.block().pre_ln())
         << ", vocab_size=" << options.vocab_size() << ", final_ln=" << yes_no(options.final_ln())
         << ")";
}

Tensor BlockStackImpl::forward(const Tensor& ids, const Tensor& key_padding_mask, KVCache* cache) {
  check_token_sequences(ids, options.vocab_size());
  check_length(cached_length(cache) + ids.size(1), "context_length",
               options.block().context_length());
  const auto h = run_blocks(*blocks, embed(ids), key_padding_mask, cache);  // [B, T, C]
  return final_ln ? final_ln(h) : h;
}

KVCache BlockStackImpl::make_cache(int64_t batch, int64_t capacity) const {
  const auto& block = options.block();
  return KVCache(KVCacheOptions(options.depth(), batch, block.num_heads(),
                                block.d_model() / block.num_heads(), capacity)
                     .dtype(embed->weight.scalar_type())
                     .device(embed->weight.device()));
}

}  // namespace attn
