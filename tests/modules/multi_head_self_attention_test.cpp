#include "attn/modules/multi_head_self_attention.h"

#include "support/attention_contract.h"
#include "support/dropout_contract.h"
#include "support/golden.h"
#include "support/golden_module.h"

#include <attn/state_dict.h>
#include <attn/summary.h>

#include <torch/utils.h>

#include <gtest/gtest.h>

namespace attn::testing {
namespace {

struct MultiHeadSelfAttentionTraits {
  static constexpr const char* kWidth = "d_model";
  static constexpr const char* kOutDropout = "out_dropout";
  static MultiHeadSelfAttention make(int64_t width, int64_t heads, bool causal,
                                     Implementation implementation) {
    return MultiHeadSelfAttention(MultiHeadSelfAttentionOptions(width, heads, 8)
                                      .causal(causal)
                                      .implementation(implementation));
  }
  static MultiHeadSelfAttention make(int64_t width, int64_t heads, double attn_dropout,
                                     double out_dropout, Implementation implementation) {
    return MultiHeadSelfAttention(MultiHeadSelfAttentionOptions(width, heads, 8)
                                      .attn_dropout(attn_dropout)
                                      .out_dropout(out_dropout)
                                      .implementation(implementation));
  }
  static torch::nn::Linear in(MultiHeadSelfAttention& module) { return module->qkv_proj; }
  static torch::nn::Linear out(MultiHeadSelfAttention& module) { return module->out_proj; }
  static torch::nn::Dropout attn_dropout(MultiHeadSelfAttention& module) {
    return module->attn_dropout;
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(MultiHeadSelfAttention, AttentionContract,
                               MultiHeadSelfAttentionTraits);
INSTANTIATE_TYPED_TEST_SUITE_P(MultiHeadSelfAttention, DropoutContract,
                               MultiHeadSelfAttentionTraits);

class MultiHeadSelfAttentionReference : public EachImplementation {};
ATTN_EACH_IMPLEMENTATION(MultiHeadSelfAttentionReference);

TEST_P(MultiHeadSelfAttentionReference, OutputsWeightsAndGradientsArePythons) {
  const auto golden = load_golden("multi_head_self_attention");
  MultiHeadSelfAttention module(
      MultiHeadSelfAttentionOptions(16, 4, 10).implementation(GetParam()));
  set_parameters(*module, golden.with_prefix("weight."));
  const auto x = golden["x"].clone().requires_grad_();
  const auto y = module(x);
  EXPECT_TRUE(all_close(y, golden["y"]));
  y.backward(golden["grad_output"]);
  EXPECT_TRUE(all_close(x.grad(), golden["grad.x"]));
  expect_gradients_close(*module, golden.with_prefix("grad."));

  const auto [again, weights] = module->forward_with_weights(x);
  EXPECT_TRUE(all_close(again, golden["y"]));
  EXPECT_TRUE(all_close(weights, golden["weights"]));
}

TEST(MultiHeadSelfAttention, DrawsPythonsWeightsAndInputs) {
  if (!draws_as_the_goldens()) GTEST_SKIP() << kOtherDraws;
  const auto golden = load_golden("multi_head_self_attention");
  torch::manual_seed(0);
  const MultiHeadSelfAttention module(16, 4, 10);
  expect_parameters_equal(*module, golden.with_prefix("weight."));
  EXPECT_TRUE(all_equal(torch::randn({2, 5, 16}), golden["x"]));
  EXPECT_TRUE(all_equal(torch::randn({2, 5, 16}), golden["grad_output"]));
}

class MultiHeadSelfAttentionDropoutReference : public ::testing::Test {
 protected:
  Golden golden = load_golden("multi_head_self_attention_dropout");
  MultiHeadSelfAttentionOptions options =
      MultiHeadSelfAttentionOptions(12, 3, 7).attn_dropout(0.25).out_dropout(0.5).implementation(
          Implementation::math);
};

TEST_F(MultiHeadSelfAttentionDropoutReference, DrawsPythonsWeightsAndInputs) {
  if (!draws_as_the_goldens()) GTEST_SKIP() << kOtherDraws;
  torch::manual_seed(1);
  const MultiHeadSelfAttention module(options);
  expect_parameters_equal(*module, golden.with_prefix("weight."));
  EXPECT_TRUE(all_equal(torch::randn({2, 7, 12}), golden["x"]));
}

TEST_F(MultiHeadSelfAttentionDropoutReference, TheSameSeedDropsWhatPythonDrops) {
  MultiHeadSelfAttention module(options);
  set_parameters(*module, golden.with_prefix("weight."));
  torch::manual_seed(2);
  const auto [y, weights] = module->forward_with_weights(golden["x"]);
  torch::manual_seed(2);
  const auto without_weights = module(golden["x"]);

  EXPECT_TRUE(all_equal(weights.eq(0), golden["weights"].eq(0)));
  EXPECT_TRUE(all_equal(y.eq(0), golden["y"].eq(0)));
  EXPECT_TRUE(all_close(weights, golden["weights"]));
  EXPECT_TRUE(all_close(y, golden["y"]));
  EXPECT_TRUE(all_equal(without_weights, y));
}

TEST(MultiHeadSelfAttention, WalksTheSecondSeedsShapes) {
  MultiHeadSelfAttention module(/*d_model=*/16, /*n_heads=*/4, /*max_context_length=*/5);
  const auto [out, weights] = module->forward_with_weights(torch::randn({2, 5, 16}));
  EXPECT_EQ(out.sizes(), torch::IntArrayRef({2, 5, 16}));
  EXPECT_EQ(weights.sizes(), torch::IntArrayRef({2, 4, 5, 5}));
  EXPECT_EQ(count_parameters(*module), 4 * 16 * 16 + 4 * 16);
}

TEST(MultiHeadSelfAttention, HasPythonsKeysInPythonsOrder) {
  EXPECT_EQ(state_dict(*MultiHeadSelfAttention(12, 3, 7)).keys(),
            Keys({"qkv_proj.weight", "qkv_proj.bias", "out_proj.weight", "out_proj.bias"}));
}

TEST(MultiHeadSelfAttention, AcceptsTheLongestContextAndNothingLonger) {
  MultiHeadSelfAttention module(12, 3, 7);
  EXPECT_EQ(module(torch::randn({1, 7, 12})).sizes(), torch::IntArrayRef({1, 7, 12}));
  const auto x = torch::randn({1, 8, 12});
  EXPECT_TRUE(mentions(value_error([&] { module(x); }), {"max_context_length (7)", "got 8"}));
  EXPECT_TRUE(mentions(value_error([&] { module->forward_with_weights(x); }),
                       {"max_context_length (7)", "got 8"}));
}

TEST(MultiHeadSelfAttention, RejectsSizesThatDoNotFit) {
  const auto message = [](int64_t d_model, int64_t n_heads, int64_t max_context_length) {
    return value_error([&] { MultiHeadSelfAttention(d_model, n_heads, max_context_length); });
  };
  EXPECT_EQ(message(8, 3, 5), "d_model must be a multiple of n_heads (3), got 8");
  for (const int64_t wrong : {0, -4}) {
    const auto got = "got " + std::to_string(wrong);
    EXPECT_TRUE(mentions(message(wrong, 4, 5), {"d_model", "1", got}));
    EXPECT_TRUE(mentions(message(8, wrong, 5), {"n_heads", "1", got}));
    EXPECT_TRUE(mentions(message(8, 4, wrong), {"max_context_length", "1", got}));
  }
}

}  // namespace
}  // namespace attn::testing
