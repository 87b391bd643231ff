#include "attn/modules/self_attention.h"

#include "support/attention_contract.h"
#include "support/golden.h"
#include "support/golden_module.h"

#include <attn/state_dict.h>
#include <attn/summary.h>

#include <torch/utils.h>

#include <gtest/gtest.h>

namespace attn::testing {
namespace {

struct SelfAttentionTraits {
  static constexpr const char* kWidth = "n_embd";
  static SelfAttention make(int64_t width, int64_t heads, bool causal,
                            Implementation implementation) {
    return SelfAttention(
        SelfAttentionOptions(width, heads).causal(causal).implementation(implementation));
  }
  static torch::nn::Linear in(SelfAttention& module) { return module->qkv; }
  static torch::nn::Linear out(SelfAttention& module) { return module->proj; }
};
INSTANTIATE_TYPED_TEST_SUITE_P(SelfAttention, AttentionContract, SelfAttentionTraits);

/// Largest |a - b| at each of the positions: [1, T, C] x2 -> [T].
torch::Tensor moved(const torch::Tensor& a, const torch::Tensor& b) {
  return (a - b).abs().amax(-1).squeeze(0);
}

class SelfAttentionReference : public EachImplementation {
 protected:
  SelfAttention make(bool causal = true) {
    auto module = SelfAttentionTraits::make(8, 2, causal, GetParam());
    set_parameters(*module, golden.with_prefix("weight."));
    return module;
  }
  Golden golden = load_golden("self_attention");
};
ATTN_EACH_IMPLEMENTATION(SelfAttentionReference);

TEST_P(SelfAttentionReference, OutputsAndGradientsArePythons) {
  auto module = make();
  const auto x = golden["x"].clone().requires_grad_();
  const auto y = module(x);
  EXPECT_TRUE(all_close(y, golden["y"]));
  EXPECT_TRUE(all_close(module(golden["x_perturbed"]), golden["y_perturbed"]));
  y.backward(golden["grad_output"]);
  EXPECT_TRUE(all_close(x.grad(), golden["grad.x"]));
  expect_gradients_close(*module, golden.with_prefix("grad."));
}

// The first seed's check; its numbers to the four decimals that it prints.
TEST_P(SelfAttentionReference, ChangingPositionTwoMovesPositionsTwoAndThreeOnly) {
  auto module = make();
  const auto change = moved(module(golden["x"]), module(golden["x_perturbed"]));
  EXPECT_EQ(change[0].item<float>(), 0.0f);
  EXPECT_EQ(change[1].item<float>(), 0.0f);
  EXPECT_NEAR(change[2].item<float>(), 0.3175, 5e-5);
  EXPECT_NEAR(change[3].item<float>(), 0.2455, 5e-5);
}

TEST_P(SelfAttentionReference, WithoutTheMaskEarlierPositionsMoveToo) {
  auto module = make(/*causal=*/false);
  const auto change = moved(module(golden["x"]), module(golden["x_perturbed"]));
  EXPECT_GT(change[0].item<float>(), 0.01f);
  EXPECT_GT(change[1].item<float>(), 0.01f);
}

TEST(SelfAttention, DrawsPythonsWeightsAndInputs) {
  if (!draws_as_the_goldens()) GTEST_SKIP() << kOtherDraws;
  const auto golden = load_golden("self_attention");
  torch::manual_seed(0);
  const SelfAttention module(8, 2);
  expect_parameters_equal(*module, golden.with_prefix("weight."));
  EXPECT_TRUE(all_equal(torch::randn({1, 4, 8}), golden["x"]));
  EXPECT_TRUE(all_equal(torch::randn({8}), golden["x_perturbed"][0][2]));
  EXPECT_TRUE(all_equal(torch::randn({1, 4, 8}), golden["grad_output"]));
}

TEST(SelfAttention, HasFourTimesTheSquareOfTheWidthInParameters) {
  EXPECT_EQ(count_parameters(*SelfAttention(8, 2)), 256);
  EXPECT_EQ(count_parameters(*SelfAttention(2048, 16)), 16'777'216);
}

TEST(SelfAttention, BiasesAreAnOption) {
  EXPECT_EQ(state_dict(*SelfAttention(8, 2)).keys(), Keys({"qkv.weight", "proj.weight"}));
  SelfAttention biased(SelfAttentionOptions(8, 2).bias(true));
  EXPECT_EQ(state_dict(*biased).keys(),
            Keys({"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}));
  const auto y = biased(torch::zeros({1, 3, 8}));  // v is the bias everywhere, whatever the weights
  const auto v = biased->qkv->bias.narrow(0, 16, 8);
  EXPECT_TRUE(all_close(y, biased->proj(v).expand({1, 3, 8})));
}

TEST(SelfAttention, RejectsSizesThatDoNotFit) {
  const auto message = [](int64_t n_embd, int64_t n_head) {
    return value_error([&] { SelfAttention(n_embd, n_head); });
  };
  EXPECT_EQ(message(8, 3), "n_embd must be a multiple of n_head (3), got 8");
  EXPECT_TRUE(mentions(message(0, 2), {"n_embd", "1", "got 0"}));
  EXPECT_TRUE(mentions(message(-8, 2), {"n_embd", "1", "got -8"}));
  EXPECT_TRUE(mentions(message(8, 0), {"n_head", "1", "got 0"}));
  EXPECT_TRUE(mentions(message(8, -2), {"n_head", "1", "got -2"}));
}

}  // namespace
}  // namespace attn::testing
