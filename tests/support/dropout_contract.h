#pragma once

// What every attention module with dropout holds. Traits as in attention_contract.h, and:
//   static Module make(int64_t width, int64_t heads, double attn_dropout, double out_dropout,
//   Implementation); static constexpr const char* kOutDropout;  // the option's name static
//   torch::nn::Dropout attn_dropout(Module&);

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/implementations.h"
#include "support/mentions.h"

#include <ATen/Functions.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace attn::testing {

template <typename Traits>
class DropoutContract : public ::testing::Test {
 protected:
  static constexpr int64_t B = 2, T = 6, C = 12, H = 3;

  void SetUp() override { torch::manual_seed(7); }

  /// The same weights whatever the probabilities.
  auto make(double attn_dropout, double out_dropout, Implementation implementation) {
    torch::manual_seed(8);
    return Traits::make(C, H, attn_dropout, out_dropout, implementation);
  }
  torch::Tensor sequence() { return torch::randn({B, T, C}); }
};

TYPED_TEST_SUITE_P(DropoutContract);

TYPED_TEST_P(DropoutContract, EvalDropsNothing) {
  const auto x = this->sequence();
  for (const auto implementation : kImplementations) {
    SCOPED_TRACE(name_of(implementation));
    auto module = this->make(0.9, 0.9, implementation);
    module->eval();
    const auto y = module(x);
    EXPECT_TRUE(all_equal(module(x), y));
    auto without = this->make(0.0, 0.0, implementation);
    EXPECT_TRUE(all_equal(y, without(x)));
    EXPECT_TRUE(all_equal(std::get<1>(module->forward_with_weights(x)),
                          std::get<1>(without->forward_with_weights(x))));
    module->train();
    EXPECT_FALSE(all_close(module(x), y));
  }
}

TYPED_TEST_P(DropoutContract, TrainingRepeatsWithTheSeedOnly) {
  const auto x = this->sequence();
  for (const auto implementation : kImplementations) {
    SCOPED_TRACE(name_of(implementation));
    auto module = this->make(0.5, 0.0, implementation);
    const auto draw = [&](uint64_t seed) {
      torch::manual_seed(seed);
      return module(x);
    };
    const auto y = draw(1);
    EXPECT_TRUE(all_equal(draw(1), y));
    EXPECT_FALSE(all_close(draw(2), y));
    EXPECT_FALSE(all_close(module(x), draw(2)));
  }
}

TYPED_TEST_P(DropoutContract, KeptWeightsAreScaledAndReturned) {
  const auto x = torch::randn({8, this->T, this->C});
  auto module = this->make(0.25, 0.0, Implementation::automatic);
  const auto [y, dropped] = module->forward_with_weights(x);
  module->eval();
  const auto full = std::get<1>(module->forward_with_weights(x));
  const auto kept = dropped.ne(0);
  EXPECT_TRUE(all_close(dropped, torch::where(kept, full / 0.75, torch::zeros_like(full))));

  // Of the 8 · 3 · 21 weights that the mask leaves, 3/4 ± 5 standard deviations of 0.019.
  const double share =
      kept.sum().template item<double>() / full.ne(0).sum().template item<double>();
  EXPECT_NEAR(share, 0.75, 0.1);

  const auto v = TypeParam::in(module)(x).chunk(3, -1)[2];           // [B, T, C]
  const auto heads = v.unflatten(2, {this->H, -1}).transpose(1, 2);  // [B, H, T, D]
  const auto merged = dropped.matmul(heads).transpose(1, 2).flatten(2);
  EXPECT_TRUE(all_close(y, TypeParam::out(module)(merged)));
}

TYPED_TEST_P(DropoutContract, TheAverageOverMasksIsTheEvalOutput) {
  const int64_t samples = 5000;
  const torch::NoGradGuard no_grad;
  const auto x = torch::randn({1, this->T, this->C});
  for (const auto implementation : kImplementations) {
    SCOPED_TRACE(name_of(implementation));
    auto module = this->make(0.5, 0.5, implementation);
    const auto y = module(x.expand({samples, -1, -1}));
    module->eval();
    // Six standard errors, from the samples themselves.
    const auto error = 6 * y.std(0) / std::sqrt(static_cast<double>(samples));
    EXPECT_TRUE(((y.mean(0) - module(x)[0]).abs() < error).all().template item<bool>());
  }
}

TYPED_TEST_P(DropoutContract, DroppingEveryWeightLeavesTheBias) {
  for (const auto implementation : kImplementations) {
    SCOPED_TRACE(name_of(implementation));
    auto module = this->make(1.0, 0.0, implementation);
    const auto x = this->sequence().requires_grad_();
    const auto y = module(x);
    EXPECT_TRUE(all_close(y, TypeParam::out(module)->bias.expand_as(y)));
    y.sum().backward();
    EXPECT_TRUE(all_equal(x.grad(), torch::zeros_like(x)));
    const auto weights = std::get<1>(module->forward_with_weights(x));
    EXPECT_TRUE(all_equal(weights, torch::zeros_like(weights)));
  }
}

TYPED_TEST_P(DropoutContract, DroppingTheWholeOutputLeavesZeros) {
  for (const auto implementation : kImplementations) {
    SCOPED_TRACE(name_of(implementation));
    auto module = this->make(0.0, 1.0, implementation);
    const auto x = this->sequence();
    EXPECT_TRUE(all_equal(module(x), torch::zeros_like(x)));
    EXPECT_TRUE(all_equal(std::get<0>(module->forward_with_weights(x)), torch::zeros_like(x)));
  }
}

// In Python, `module.attn_dropout.eval()` and `module.attn_dropout.p = 0` do that too.
TYPED_TEST_P(DropoutContract, TheChildModulesDecide) {
  const auto x = this->sequence();
  for (const auto implementation : kImplementations) {
    SCOPED_TRACE(name_of(implementation));
    auto module = this->make(0.5, 0.0, implementation);
    const auto expected = this->make(0.0, 0.0, implementation)(x);
    auto dropout = TypeParam::attn_dropout(module);
    dropout->eval();
    EXPECT_TRUE(all_equal(module(x), expected));
    dropout->train();
    EXPECT_FALSE(all_close(module(x), expected));
    dropout->options.p(0.0);
    EXPECT_TRUE(all_equal(module(x), expected));
  }
}

TYPED_TEST_P(DropoutContract, RejectsWhatIsNoProbability) {
  for (const double p : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    const std::string got = std::isnan(p) ? "nan" : p < 0 ? "-0.1" : "1.1";
    EXPECT_TRUE(mentions(value_error([&] { this->make(p, 0.0, Implementation::automatic); }),
                         {"attn_dropout", "[0, 1]", got}));
    EXPECT_TRUE(mentions(value_error([&] { this->make(0.0, p, Implementation::automatic); }),
                         {TypeParam::kOutDropout, "[0, 1]", got}));
  }
}

REGISTER_TYPED_TEST_SUITE_P(DropoutContract, EvalDropsNothing, TrainingRepeatsWithTheSeedOnly,
                            KeptWeightsAreScaledAndReturned, TheAverageOverMasksIsTheEvalOutput,
                            DroppingEveryWeightLeavesTheBias, DroppingTheWholeOutputLeavesZeros,
                            TheChildModulesDecide, RejectsWhatIsNoProbability);

}  // namespace attn::testing
