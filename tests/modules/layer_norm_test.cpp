#include "attn/modules/layer_norm.h"

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

/// The definition, with the biased variance.
torch::Tensor by_hand(const torch::Tensor& x, const torch::Tensor& scale,
                      const torch::Tensor& shift, double eps) {
  const auto centred = x - x.mean(-1, /*keepdim=*/true);
  const auto variance = centred.square().mean(-1, /*keepdim=*/true);
  return scale * centred / (variance + eps).sqrt() + shift;
}

class LayerNormTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(7); }

  /// With a scale and a shift that show when they are not applied.
  LayerNorm make(double eps = 1e-5, torch::Dtype dtype = torch::kFloat64) {
    LayerNorm module(6, eps);
    module->to(dtype);
    const torch::NoGradGuard no_grad;
    module->scale.normal_(1.0, 0.5);
    module->shift.normal_();
    return module;
  }
  torch::Tensor expected(LayerNorm& module, const torch::Tensor& x) {
    return by_hand(x, module->scale, module->shift, module->options.eps());
  }
};

TEST_F(LayerNormTest, MatchesTheFormulaForAnyLeadingShape) {
  auto module = make();
  for (const auto& shape : std::vector<std::vector<int64_t>>{{6}, {3, 6}, {2, 5, 6}, {0, 5, 6}}) {
    const auto x = torch::randn(shape, torch::kFloat64) * 3 + 2;
    EXPECT_TRUE(all_close(module(x), expected(module, x))) << x.sizes();
  }
}

TEST_F(LayerNormTest, GradientsMatchTheFormulas) {
  auto module = make();
  const auto x = torch::randn({2, 5, 6}, torch::kFloat64).requires_grad_();
  const auto grad_output = torch::randn({2, 5, 6}, torch::kFloat64);
  const auto gradients = [&](const torch::Tensor& y) {
    module->zero_grad();
    x.mutable_grad().reset();
    y.backward(grad_output);
    return std::vector<torch::Tensor>{x.grad().clone(), module->scale.grad().clone(),
                                      module->shift.grad().clone()};
  };
  const auto actual = gradients(module(x));
  const auto wanted = gradients(expected(module, x));
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(all_close(actual[i], wanted[i])) << i;
}

TEST_F(LayerNormTest, EpsIsAnOptionThatCounts) {
  const auto x = torch::randn({2, 6}, torch::kFloat64);
  auto module = make(/*eps=*/0.5);
  EXPECT_TRUE(all_close(module(x), expected(module, x)));
  EXPECT_FALSE(all_close(module(x), by_hand(x, module->scale, module->shift, 1e-5)));
  EXPECT_EQ(LayerNorm(6)->options.eps(), 1e-5);
}

TEST_F(LayerNormTest, ConstantRowsGiveTheShift) {
  auto module = make();
  const auto y = module(torch::full({3, 6}, 7.0, torch::kFloat64));
  EXPECT_TRUE(all_equal(y, module->shift.expand({3, 6})));
}

TEST_F(LayerNormTest, KeepsTheDtype) {
  const auto x = torch::randn({4, 6});
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16}) {
    auto module = make(1e-5, dtype);
    const auto y = module(x.to(dtype));
    EXPECT_EQ(y.scalar_type(), dtype);
    // The formula in double on what the dtype holds; two roundings at most.
    const auto wide = by_hand(x.to(dtype).to(torch::kFloat64), module->scale.to(torch::kFloat64),
                              module->shift.to(torch::kFloat64), 1e-5);
    const auto tolerance =
        dtype == torch::kBFloat16 ? Tolerance{1.6e-2, 1e-2} : default_tolerance(dtype);
    EXPECT_TRUE(all_close(y, wide.to(dtype), tolerance)) << dtype;
  }
}

TEST_F(LayerNormTest, StartsAsPlainNormalisationWithPythonsKeys) {
  const LayerNorm module(6);
  const auto state = state_dict(*module);
  EXPECT_EQ(state.keys(), Keys({"scale", "shift"}));
  EXPECT_TRUE(all_equal(state["scale"], torch::ones({6})));
  EXPECT_TRUE(all_equal(state["shift"], torch::zeros({6})));
}

TEST_F(LayerNormTest, RejectsWhatDoesNotFit) {
  const auto message = [](int64_t d_model, double eps) {
    return value_error([&] { LayerNorm(d_model, eps); });
  };
  EXPECT_TRUE(mentions(message(0, 1e-5), {"d_model", "1", "got 0"}));
  EXPECT_TRUE(mentions(message(-6, 1e-5), {"d_model", "1", "got -6"}));
  EXPECT_TRUE(mentions(message(6, -0.5), {"eps", "0", "got -0.5"}));
  EXPECT_TRUE(mentions(message(6, std::numeric_limits<double>::infinity()), {"eps", "got inf"}));
  EXPECT_TRUE(mentions(message(6, std::numeric_limits<double>::quiet_NaN()), {"eps", "got nan"}));

  LayerNorm module(6);
  EXPECT_TRUE(mentions(value_error([&] {
                         module(torch::ones({2, 5}));
                       }),
                       {"d_model (6)", "[2, 5]"}));
  EXPECT_TRUE(mentions(value_error([&] { module(torch::ones({})); }), {"d_model (6)", "[]"}));
  EXPECT_TRUE(mentions(value_error([&] { module(torch::ones({6}, torch::kLong)); }),
                       {"floating-point", "Long"}));
}

}  // namespace
}  // namespace attn::testing
