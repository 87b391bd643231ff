#include "attn/summary.h"

#include "support/mentions.h"

#include <attn/models/tiny_attention_lm.h>
#include <attn/modules/self_attention.h>
#include <attn/modules/transformer_block.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <gtest/gtest.h>

#include <sstream>
#include <string>

namespace attn::testing {
namespace {

/// One tensor under two names.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(10, 4));
    head = register_parameter("head", embedding->weight);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::Tensor head;
};

/// The line that mentions a name.
std::string line_of(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(name) != std::string::npos) return line;
  }
  return "no line has " + name;
}

TEST(CountParameters, AddsTheElementsOfEveryParameter) {
  EXPECT_EQ(count_parameters(*SelfAttention(8, 2)), 4 * 8 * 8);
  EXPECT_EQ(count_parameters(*SinusoidalPositionalEmbedding(8, 4)), 0);
  EXPECT_EQ(count_parameters(*torch::nn::BatchNorm1d(4)), 8);  // not its buffers
}

TEST(CountParameters, CountsASharedTensorOnce) {
  EXPECT_EQ(count_parameters(TiedImpl()), 40);
}

TEST(CountParameters, CountsFrozenParametersToo) {
  const SelfAttention module(8, 2);
  module->qkv->weight.requires_grad_(false);
  EXPECT_EQ(count_parameters(*module), 256);
}

TEST(Summary, ShowsEveryNameTypeShapeCountAndSize) {
  const TinyAttentionLM model(64, 32, 4, 12);
  const auto text = summary(*model);
  EXPECT_TRUE(mentions(text, {"TinyAttentionLM\n", "token_emb  ", "TokenEmbedding", "pos_emb",
                              "SinusoidalPositionalEmbedding", "attn", "MultiHeadSelfAttention",
                              "qkv_proj", "out_proj", "lm_head", "Linear"}));
  EXPECT_TRUE(mentions(line_of(text, "[64, 32]"), {"weight", "Float", "2,048", "8.0 KiB"}));
  EXPECT_TRUE(mentions(line_of(text, "[96, 32]"), {"weight", "Float", "3,072", "12.0 KiB"}));
  EXPECT_TRUE(mentions(line_of(text, "[96]"), {"bias", "96", "384 B"}));
  const int64_t total = 64 * 32 + (4 * 32 * 32 + 4 * 32) + (32 * 64 + 64);
  ASSERT_EQ(total, 8384);
  EXPECT_TRUE(mentions(text, {"\n8,384 parameters (8,384 trainable), 32.8 KiB\n"}));
  EXPECT_EQ(text.find("buffers"), std::string::npos);
}

TEST(Summary, IndentsChildrenBelowTheirParents) {
  const auto options = BlockOptions().d_model(12).num_heads(3).context_length(8);
  const auto text = summary(*BlockStack(options, 2));
  EXPECT_TRUE(mentions(text, {"\n  blocks ", "\n    0 ", "\n    1 ", "\n      attn ",
                              "\n        qkv ", "\n          weight ", "\n  final_ln "}));
}

TEST(Summary, FollowsDtypeAndFreezing) {
  SelfAttention module(8, 2);
  module->to(torch::kBFloat16);
  module->qkv->weight.requires_grad_(false);
  const auto text = summary(*module);
  EXPECT_TRUE(mentions(line_of(text, "[24, 8]"), {"BFloat16", "192", "384 B"}));
  EXPECT_TRUE(mentions(text, {"256 parameters (64 trainable), 512 B\n"}));
}

TEST(Summary, CountsASharedTensorOnceAndSaysSo) {
  const auto text = summary(TiedImpl());
  EXPECT_TRUE(mentions(text, {"[10, 4] Float (shared)", "40 parameters (40 trainable), 160 B\n"}));
}

TEST(Summary, ListsBuffersBesideTheParameters) {
  const auto text = summary(*torch::nn::Sequential(torch::nn::BatchNorm1d(4)));
  EXPECT_TRUE(mentions(line_of(text, "running_mean"), {"[4] Float buffer", "16 B"}));
  EXPECT_TRUE(mentions(line_of(text, "num_batches_tracked"), {"[] Long buffer", "8 B"}));
  EXPECT_TRUE(mentions(text, {"8 parameters (8 trainable), 32 B\n", "buffers: 40 B\n"}));
}

TEST(Summary, IsTidyForAModuleWithoutTensors) {
  EXPECT_TRUE(mentions(summary(*SinusoidalPositionalEmbedding(8, 4)),
                       {"SinusoidalPositionalEmbedding\n0 parameters (0 trainable), 0 B\n"}));
}

TEST(Summary, HasNoTrailingSpacesAndAlignedColumns) {
  std::istringstream lines(summary(*TinyAttentionLM(64, 32, 4, 12)));
  size_t column = 0;
  for (std::string line; std::getline(lines, line);) {
    EXPECT_NE(line.back(), ' ') << line;
    const auto shape = line.find('[');
    if (shape == std::string::npos) continue;
    if (column == 0) column = shape;
    EXPECT_EQ(shape, column) << line;
  }
  EXPECT_GT(column, 0u);
}

}  // namespace
}  // namespace attn::testing
