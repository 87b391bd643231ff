#include "attn/modules/feed_forward.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/golden_module.h"
#include "support/mentions.h"

#include <attn/state_dict.h>
#include <attn/summary.h>

#include <ATen/Functions.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <cmath>
#include <map>

namespace attn::testing {
namespace {

constexpr double kPi = 3.141592653589793;

BlockOptions small() {
  return BlockOptions().d_model(6).residual_dropout(0.0);
}

torch::Tensor activation_by_hand(const torch::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::gelu_tanh:  // Hendrycks and Gimpel 2016
      return 0.5 * x * (1 + (std::sqrt(2 / kPi) * (x + 0.044715 * x.pow(3))).tanh());
    case Activation::gelu:
      return 0.5 * x * (1 + (x / std::sqrt(2.0)).erf());
    case Activation::relu:
      return x.clamp_min(0);
  }
  return {};
}

torch::Tensor by_hand(FeedForward& module, const torch::Tensor& x) {
  const auto hidden = x.matmul(module->fc1->weight.t()) + module->fc1->bias;
  return activation_by_hand(hidden, module->options.activation()).matmul(module->fc2->weight.t()) +
         module->fc2->bias;
}

class FeedForwardTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(7); }
};

TEST_F(FeedForwardTest, EachActivationMatchesItsFormulaWithGradients) {
  // Wide enough that exact and tanh GELU (at most 5e-4 apart) can be told from one another in
  // double.
  const auto x = (3 * torch::randn({2, 5, 6}, torch::kFloat64)).requires_grad_();
  std::map<Activation, torch::Tensor> outputs;
  for (const auto activation : {Activation::gelu_tanh, Activation::gelu, Activation::relu}) {
    torch::manual_seed(8);
    FeedForward module(small().activation(activation));
    module->to(torch::kFloat64);
    const auto y = module(x);
    const auto expected = by_hand(module, x);
    EXPECT_TRUE(all_close(y, expected));
    outputs[activation] = y.detach();

    std::map<std::string, torch::Tensor> gradients;
    expected.sum().backward();
    for (auto& parameter : module->named_parameters()) {
      gradients[parameter.key()] = parameter.value().grad().clone();
    }
    const auto x_grad = x.grad().clone();
    module->zero_grad();
    x.mutable_grad().reset();
    y.sum().backward();
    EXPECT_TRUE(all_close(x.grad(), x_grad));
    expect_gradients_close(*module, gradients);
    x.mutable_grad().reset();
  }
  EXPECT_FALSE(all_close(outputs[Activation::gelu], outputs[Activation::gelu_tanh]));
  EXPECT_FALSE(all_close(outputs[Activation::relu], outputs[Activation::gelu_tanh]));
}

TEST_F(FeedForwardTest, TheDefaultIsGeluByTanh) {
  FeedForward module(small());
  module->to(torch::kFloat64);
  const auto x = torch::randn({3, 6}, torch::kFloat64);
  EXPECT_EQ(module->options.activation(), Activation::gelu_tanh);
  EXPECT_TRUE(all_close(module(x), by_hand(module, x)));
}

TEST_F(FeedForwardTest, TheExpansionIsTheInnerWidth) {
  EXPECT_EQ(FeedForward(small())->fc1->weight.sizes(), torch::IntArrayRef({24, 6}));
  FeedForward module(small().mlp_expansion(3));
  EXPECT_EQ(module->fc1->weight.sizes(), torch::IntArrayRef({18, 6}));
  EXPECT_EQ(module->fc2->weight.sizes(), torch::IntArrayRef({6, 18}));
  EXPECT_EQ(count_parameters(*module), 2 * 6 * 18 + 18 + 6);
  EXPECT_EQ(module(torch::randn({0, 4, 6})).sizes(), torch::IntArrayRef({0, 4, 6}));
}

TEST_F(FeedForwardTest, HasPythonsKeysInPythonsOrder) {
  EXPECT_EQ(state_dict(*FeedForward(small())).keys(),
            Keys({"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}));
  FeedForward unbiased(small().use_bias(false));
  EXPECT_EQ(state_dict(*unbiased).keys(), Keys({"fc1.weight", "fc2.weight"}));
  EXPECT_TRUE(all_equal(unbiased(torch::zeros({2, 6})), torch::zeros({2, 6})));
}

TEST_F(FeedForwardTest, DropoutComesLastAndInTrainingOnly) {
  FeedForward module(small().residual_dropout(0.5));
  const auto x = torch::randn({50, 6});
  const auto dropped = module(x);
  module->eval();
  const auto full = module(x);
  EXPECT_TRUE(all_close(full, by_hand(module, x)));
  EXPECT_TRUE(all_equal(module(x), full));

  const auto kept = dropped.ne(0);
  EXPECT_TRUE(all_close(dropped, torch::where(kept, 2 * full, torch::zeros_like(full))));
  // Of 300 values, half ± 5 standard deviations of 0.029.
  EXPECT_NEAR(kept.to(torch::kFloat).mean().item<float>(), 0.5, 0.15);

  FeedForward nothing(small().residual_dropout(1.0));
  EXPECT_TRUE(all_equal(nothing(x), torch::zeros_like(x)));
}

TEST_F(FeedForwardTest, TrainingAndEvalAgreeBitForBitWithoutDropout) {
  FeedForward module(small());
  const auto x = torch::randn({2, 5, 6});
  const auto training = module(x);
  module->eval();
  EXPECT_TRUE(all_equal(module(x), training));
}

TEST_F(FeedForwardTest, RejectsWhatDoesNotFit) {
  const auto message = [](const BlockOptions& options) {
    return value_error([&] { FeedForward module(options); });
  };
  EXPECT_TRUE(mentions(message(small().d_model(0)), {"d_model", "1", "got 0"}));
  EXPECT_TRUE(mentions(message(small().mlp_expansion(0)), {"mlp_expansion", "1", "got 0"}));
  EXPECT_TRUE(mentions(message(small().mlp_expansion(-4)), {"mlp_expansion", "1", "got -4"}));
  EXPECT_TRUE(
      mentions(message(small().residual_dropout(1.5)), {"residual_dropout", "[0, 1]", "got 1.5"}));
  EXPECT_TRUE(mentions(message(small().residual_dropout(-0.5)), {"residual_dropout", "got -0.5"}));
  FeedForward module(small());
  EXPECT_TRUE(mentions(value_error([&] {
                         module(torch::ones({2, 5}));
                       }),
                       {"d_model (6)", "[2, 5]"}));
}

}  // namespace
}  // namespace attn::testing
