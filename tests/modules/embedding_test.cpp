#include "attn/modules/embedding.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/golden_module.h"
#include "support/mentions.h"

#include <attn/state_dict.h>

#include <torch/utils.h>

#include <gtest/gtest.h>

#include <limits>

namespace attn::testing {
namespace {

torch::Tensor ids(std::initializer_list<int64_t> values) {
  return torch::tensor(at::ArrayRef<int64_t>(values));
}

TEST(TokenEmbedding, IsDrawnTwiceTheSecondTimeWithTwoHundredths) {
  torch::manual_seed(3);
  const TokenEmbedding module(50, 32);
  torch::manual_seed(3);
  torch::empty({50, 32}).normal_();  // nn.Embedding's own
  EXPECT_TRUE(all_equal(module->embedding->weight, torch::empty({50, 32}).normal_(0.0, 0.02)));
  EXPECT_EQ(state_dict(*module).keys(), Keys({"embedding.weight"}));
}

TEST(TokenEmbedding, LooksRowsUpForIdsOfAnyShape) {
  TokenEmbedding module(5, 4);
  const auto& table = module->embedding->weight;
  EXPECT_TRUE(all_equal(module(ids({4, 0, 4})), torch::stack({table[4], table[0], table[4]})));
  EXPECT_EQ(module(torch::zeros({2, 3}, torch::kLong)).sizes(), torch::IntArrayRef({2, 3, 4}));
  EXPECT_EQ(module(torch::zeros({0, 3}, torch::kLong)).sizes(), torch::IntArrayRef({0, 3, 4}));
  EXPECT_TRUE(all_equal(module(ids({4, 0}).to(torch::kInt)), module(ids({4, 0}))));
  const auto every_other = torch::arange(5).slice(0, 0, 5, 2);  // not contiguous
  EXPECT_TRUE(all_equal(module(every_other), module(ids({0, 2, 4}))));
}

TEST(TokenEmbedding, GradientsAddUpPerId) {
  TokenEmbedding module(3, 2);
  module(ids({2, 0, 2})).sum().backward();
  EXPECT_TRUE(all_equal(module->embedding->weight.grad(),
                        torch::tensor({{1.0f, 1.0f}, {0.0f, 0.0f}, {2.0f, 2.0f}})));
}

TEST(TokenEmbedding, RejectsIdsByNameAndStaysUsable) {
  TokenEmbedding module(5, 4);
  const auto message = [&](const torch::Tensor& wrong) {
    return value_error([&] { module(wrong); });
  };
  EXPECT_TRUE(mentions(message(ids({0, 5, 1})), {"ids", "vocab_size (5)", "got 5"}));
  EXPECT_TRUE(mentions(message(ids({3, -1})), {"ids", "0", "got -1"}));
  const auto least = std::numeric_limits<int64_t>::min();
  EXPECT_TRUE(mentions(message(ids({least})), {"ids", "got " + std::to_string(least)}));
  EXPECT_TRUE(mentions(message(ids({1, 7}).to(torch::kInt)), {"vocab_size (5)", "got 7"}));
  EXPECT_TRUE(mentions(message(torch::tensor({{0, 9}, {1, 2}}).t()), {"vocab_size (5)", "got 9"}));
  EXPECT_TRUE(mentions(message(torch::ones({2})), {"ids", "int64", "Float"}));
  EXPECT_TRUE(mentions(message(torch::ones({2}, torch::kBool)), {"ids", "int64", "Bool"}));
  EXPECT_TRUE(mentions(message(torch::Tensor()), {"ids", "undefined"}));
  EXPECT_TRUE(all_equal(module(ids({4})), module->embedding->weight.narrow(0, 4, 1)));
}

TEST(TokenEmbedding, RejectsSizesBelowOne) {
  const auto message = [](int64_t vocab_size, int64_t d_model) {
    return value_error([&] { TokenEmbedding(vocab_size, d_model); });
  };
  for (const int64_t wrong : {0, -2}) {
    const auto got = "got " + std::to_string(wrong);
    EXPECT_TRUE(mentions(message(wrong, 4), {"vocab_size", "1", got}));
    EXPECT_TRUE(mentions(message(5, wrong), {"d_model", "1", got}));
  }
}

// sin(p), cos(p), sin(p / 100), cos(p / 100).
torch::Tensor first_four_positions() {
  return torch::tensor({{0.0, 1.0, 0.0, 1.0},
                        {0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004},
                        {0.9092974268, -0.4161468365, 0.0199986667, 0.9998000067},
                        {0.1411200081, -0.9899924966, 0.0299955002, 0.9995500337}},
                       torch::kFloat32);
}

/// pe[p, 2i] = sin(p / base^(2i / C)) and pe[p, 2i + 1] = cos of the same, in float32 as Python
/// does.
torch::Tensor table_by_hand(int64_t length, int64_t width, double base) {
  const auto exponent = torch::arange(0, width, 2, torch::kFloat) / static_cast<double>(width);
  const auto angle = torch::arange(length, torch::kFloat).unsqueeze(1) / torch::pow(base, exponent);
  return torch::stack({angle.sin(), angle.cos()}, -1).flatten(1);
}

TEST(SinusoidalPositionalEmbedding, HoldsTheKnownValues) {
  SinusoidalPositionalEmbedding module(6, 4);
  EXPECT_TRUE(all_close(module(4), first_four_positions(), {0.0, 1e-7}));
  SinusoidalPositionalEmbedding narrow(2, 2);
  EXPECT_TRUE(all_close(narrow(2), first_four_positions().narrow(0, 0, 2).narrow(1, 0, 2)));
}

TEST(SinusoidalPositionalEmbedding, IsPythonsTableBitForBit) {
  SinusoidalPositionalEmbedding module(100, 32);
  EXPECT_TRUE(all_equal(module(100), table_by_hand(100, 32, 10000.0)));
  SinusoidalPositionalEmbedding other(100, 32, /*base=*/500.0);
  EXPECT_TRUE(all_equal(other(100), table_by_hand(100, 32, 500.0)));
  EXPECT_FALSE(all_close(other(100), module(100)));
}

TEST(SinusoidalPositionalEmbedding, AnOffsetContinuesTheTable) {
  SinusoidalPositionalEmbedding module(6, 4);
  EXPECT_TRUE(all_equal(module(3, /*offset=*/2), module(6).narrow(0, 2, 3)));
  EXPECT_TRUE(all_equal(module(1, /*offset=*/5), module(6).narrow(0, 5, 1)));
}

TEST(SinusoidalPositionalEmbedding, IsDerivedSoNeitherLearnedNorSaved) {
  const SinusoidalPositionalEmbedding module(6, 4);
  EXPECT_TRUE(module->parameters().empty());
  EXPECT_TRUE(module->buffers().empty());
  EXPECT_TRUE(state_dict(*module).is_empty());
  EXPECT_FALSE(module->pe.requires_grad());
}

TEST(SinusoidalPositionalEmbedding, ConversionsRebuildTheTable) {
  const auto table = table_by_hand(100, 32, 10000.0);
  SinusoidalPositionalEmbedding module(100, 32);
  for (const auto dtype : {torch::kBFloat16, torch::kFloat64, torch::kFloat16, torch::kFloat32}) {
    module->to(dtype);
    // From float32, never through the dtype before: a cast back from bfloat16 would keep 8 bits.
    EXPECT_TRUE(all_equal(module(100), table.to(dtype))) << dtype;
  }
  module->to(torch::kCPU, torch::kFloat64);
  EXPECT_TRUE(all_equal(module(100), table.to(torch::kFloat64)));
  module->to(torch::kCPU);
  EXPECT_EQ(module(100).scalar_type(), torch::kFloat64);
}

TEST(SinusoidalPositionalEmbedding, ClonesKeepDtypeAndBaseAndShareNothing) {
  SinusoidalPositionalEmbedding module(10, 8, /*base=*/100.0);
  module->to(torch::kBFloat16);
  const auto copy = std::dynamic_pointer_cast<SinusoidalPositionalEmbeddingImpl>(module->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(all_equal(copy->forward(10), module(10)));
  EXPECT_NE(copy->pe.data_ptr(), module->pe.data_ptr());
  copy->to(torch::kFloat32);
  EXPECT_TRUE(all_equal(copy->forward(10), table_by_hand(10, 8, 100.0)));
  EXPECT_EQ(module(10).scalar_type(), torch::kBFloat16);
}

TEST(SinusoidalPositionalEmbedding, RejectsLengthsBeyondTheTable) {
  SinusoidalPositionalEmbedding module(6, 4);
  const auto message = [&](int64_t seq_len, int64_t offset) {
    return value_error([&] { module(seq_len, offset); });
  };
  EXPECT_TRUE(mentions(message(7, 0), {"seq_len", "max_context_length (6)", "7"}));
  EXPECT_TRUE(mentions(message(0, 0), {"seq_len", "1", "got 0"}));
  EXPECT_TRUE(mentions(message(-1, 0), {"seq_len", "1", "got -1"}));
  EXPECT_TRUE(mentions(message(2, -1), {"offset", "0", "got -1"}));
  EXPECT_TRUE(mentions(message(3, 4), {"offset", "max_context_length (6)", "3", "4"}));
  const auto huge = std::numeric_limits<int64_t>::max();
  EXPECT_TRUE(mentions(message(huge, huge), {"max_context_length (6)"}));
}

TEST(SinusoidalPositionalEmbedding, RejectsSizesThatDoNotFit) {
  const auto message = [](int64_t max_context_length, int64_t d_model, double base = 10000.0) {
    return value_error([&] { SinusoidalPositionalEmbedding(max_context_length, d_model, base); });
  };
  EXPECT_EQ(message(6, 5), "d_model must be even, got 5");
  for (const int64_t wrong : {0, -2}) {
    const auto got = "got " + std::to_string(wrong);
    EXPECT_TRUE(mentions(message(wrong, 4), {"max_context_length", "1", got}));
    EXPECT_TRUE(mentions(message(6, wrong), {"d_model", "1", got}));
  }
  EXPECT_TRUE(mentions(message(6, 4, 0.0), {"base", "positive", "got 0"}));
  EXPECT_TRUE(mentions(message(6, 4, -2.0), {"base", "positive", "got -2"}));
  EXPECT_TRUE(mentions(message(6, 4, std::numeric_limits<double>::quiet_NaN()), {"base", "nan"}));
}

}  // namespace
}  // namespace attn::testing
