#pragma once

// Every module of the library behind one interface, so that what holds for all is written once.

#include "support/implementations.h"

#include <attn/models/gpt.h>
#include <attn/models/tiny_attention_lm.h>
#include <attn/modules/embedding.h>
#include <attn/modules/feed_forward.h>
#include <attn/modules/layer_norm.h>
#include <attn/modules/multi_head_attention.h>
#include <attn/modules/multi_head_self_attention.h>
#include <attn/modules/self_attention.h>
#include <attn/modules/transformer_block.h>

#include <ATen/Functions.h>
#include <torch/nn/modules/container/any.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

namespace attn::testing {

struct ModuleConfig {
  Implementation implementation = Implementation::automatic;
  bool causal = true;
  double dropout = 0.0;
  int64_t context = 8;  // the longest T
};

/// What `forward` takes.
enum class Input {
  sequence,  // [B, T, C]
  ids,       // [B, T]
  length,    // T
};

struct ModuleCase {
  static constexpr int64_t kWidth = 12, kHeads = 3, kVocab = 20;

  std::string name;
  Input input;
  bool attends;    // positions see one another, and forward takes a key_padding_mask
  bool drops;      // has dropout
  bool positions;  // knows where in the sequence a token stands
  torch::nn::AnyModule (*make)(const ModuleConfig&);

  torch::Tensor random_input(int64_t B, int64_t T, torch::Dtype dtype = torch::kFloat32) const {
    if (input == Input::sequence) return torch::randn({B, T, kWidth}).to(dtype);
    return torch::randint(0, kVocab, {B, T});
  }

  /// The same, with new tokens at position t.
  torch::Tensor with_other_token(const torch::Tensor& x, int64_t t) const {
    auto changed = x.clone();
    auto token = changed.select(1, t);
    if (input == Input::sequence) {
      token.normal_();
    } else {
      token.add_(1).remainder_(kVocab);
    }
    return changed;
  }

  /// forward(x), or forward(x, key_padding_mask) where a mask is given.
  torch::Tensor run(torch::nn::AnyModule& module, const torch::Tensor& x,
                    const torch::Tensor& key_padding_mask = {}) const {
    if (input == Input::length) return module.forward<torch::Tensor>(x.size(1));
    if (!key_padding_mask.defined()) return module.forward<torch::Tensor>(x);
    return module.forward<torch::Tensor>(x, key_padding_mask);
  }
};

inline BlockOptions block_options(const ModuleConfig& config) {
  return BlockOptions()
      .d_model(ModuleCase::kWidth)
      .num_heads(ModuleCase::kHeads)
      .context_length(config.context)
      .attn_dropout(config.dropout)
      .residual_dropout(config.dropout)
      .causal(config.causal)
      .implementation(config.implementation);
}

inline const std::vector<ModuleCase>& all_modules() {
  using torch::nn::AnyModule;
  using C = ModuleConfig;
  static constexpr auto W = ModuleCase::kWidth, H = ModuleCase::kHeads, V = ModuleCase::kVocab;
  static const std::vector<ModuleCase> modules = {
      {"SelfAttention", Input::sequence, true, false, false,
       [](const C& c) {
         return AnyModule(SelfAttention(
             SelfAttentionOptions(W, H).causal(c.causal).implementation(c.implementation)));
       }},
      {"MultiHeadSelfAttention", Input::sequence, true, true, false,
       [](const C& c) {
         return AnyModule(MultiHeadSelfAttention(MultiHeadSelfAttentionOptions(W, H, c.context)
                                                     .attn_dropout(c.dropout)
                                                     .out_dropout(c.dropout)
                                                     .causal(c.causal)
                                                     .implementation(c.implementation)));
       }},
      {"MultiHeadAttention", Input::sequence, true, true, false,
       [](const C& c) { return AnyModule(MultiHeadAttention(block_options(c))); }},
      {"TransformerBlockPreLn", Input::sequence, true, true, false,
       [](const C& c) { return AnyModule(TransformerBlock(block_options(c).pre_ln(true))); }},
      {"TransformerBlockPostLn", Input::sequence, true, true, false,
       [](const C& c) { return AnyModule(TransformerBlock(block_options(c).pre_ln(false))); }},
      {"BlockStack", Input::ids, true, true, false,
       [](const C& c) {
         return AnyModule(BlockStack(BlockStackOptions(block_options(c), 2).vocab_size(V)));
       }},
      {"TinyAttentionLM", Input::ids, true, false, true,
       [](const C& c) {
         return AnyModule(TinyAttentionLM(TinyAttentionLMOptions(V, W, H, c.context)
                                              .causal(c.causal)
                                              .implementation(c.implementation)));
       }},
      {"GPT", Input::ids, true, true, true,
       [](const C& c) {
         return AnyModule(GPT(GPTOptions()
                                  .vocab_size(V)
                                  .context_length(c.context)
                                  .d_model(W)
                                  .num_heads(H)
                                  .num_layers(2)
                                  .dropout(c.dropout)
                                  .implementation(c.implementation)));
       }},
      {"LayerNorm", Input::sequence, false, false, false,
       [](const C&) { return AnyModule(LayerNorm(W)); }},
      {"FeedForward", Input::sequence, false, true, false,
       [](const C& c) { return AnyModule(FeedForward(block_options(c))); }},
      {"TokenEmbedding", Input::ids, false, false, false,
       [](const C&) { return AnyModule(TokenEmbedding(V, W)); }},
      {"SinusoidalPositionalEmbedding", Input::length, false, false, true,
       [](const C& c) { return AnyModule(SinusoidalPositionalEmbedding(c.context, W)); }},
  };
  return modules;
}

inline std::vector<ModuleCase> modules_where(bool (*holds)(const ModuleCase&)) {
  std::vector<ModuleCase> chosen;
  for (const auto& module : all_modules()) {
    if (holds(module)) chosen.push_back(module);
  }
  return chosen;
}

inline std::ostream& operator<<(std::ostream& out, const ModuleCase& module) {
  return out << module.name;
}

inline std::string module_name(const ::testing::TestParamInfo<ModuleCase>& info) {
  return info.param.name;
}

}  // namespace attn::testing
