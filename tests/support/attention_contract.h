#pragma once

// What every attention module holds, whatever it is called. A module's test file describes the
// module by a Traits type and instantiates the suite:
//   static Module make(int64_t width, int64_t heads, bool causal, Implementation);  // at least 8
//   tokens static torch::nn::Linear in(Module&), out(Module&);                               // its
//   projections static constexpr const char* kWidth;                                             //
//   Python's name of C

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/implementations.h"
#include "support/mentions.h"

#include <ATen/Functions.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <cmath>

namespace attn::testing {

struct AttentionByHand {
  torch::Tensor out;      // [B, T, C]
  torch::Tensor weights;  // [B, H, T, T]
};

/// The textbook, one query at a time.
inline AttentionByHand attention_by_hand(const torch::Tensor& x, torch::nn::Linear in,
                                         torch::nn::Linear out, int64_t n_head, bool causal) {
  const int64_t B = x.size(0), T = x.size(1), C = x.size(2), D = C / n_head;
  const auto qkv = in(x);  // [B, T, 3C]
  const auto weights = torch::zeros({B, n_head, T, T}, x.options());
  const auto merged = torch::zeros({B, T, C}, x.options());
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < n_head; ++h) {
      const auto q = qkv[b].narrow(1, h * D, D);          // [T, D]
      const auto k = qkv[b].narrow(1, C + h * D, D);      // [T, D]
      const auto v = qkv[b].narrow(1, 2 * C + h * D, D);  // [T, D]
      for (int64_t t = 0; t < T; ++t) {
        const int64_t seen = causal ? t + 1 : T;
        const auto scores = k.narrow(0, 0, seen).mv(q[t]) / std::sqrt(static_cast<double>(D));
        const auto p = scores.exp() / scores.exp().sum();  // [seen]
        weights[b][h][t].narrow(0, 0, seen).copy_(p);
        merged[b][t].narrow(0, h * D, D).copy_(p.matmul(v.narrow(0, 0, seen)));
      }
    }
  }
  return {out(merged), weights};
}

template <typename Traits>
class AttentionContract : public ::testing::Test {
 protected:
  static constexpr int64_t B = 2, T = 5, C = 12, H = 3;

  void SetUp() override { torch::manual_seed(7); }

  auto make(Implementation implementation, bool causal = true) {
    return Traits::make(C, H, causal, implementation);
  }
  torch::Tensor sequence() { return torch::randn({B, T, C}); }

  /// Calls check(module) with a causal module of each implementation.
  template <typename Check>
  void with_each(Check check) {
    for (const auto implementation : kImplementations) {
      SCOPED_TRACE(name_of(implementation));
      check(make(implementation));
    }
  }

  /// The rows of the packed projection that make q and k (first 2C) or v (last C).
  static torch::Tensor qk_rows(const torch::Tensor& packed) { return packed.narrow(0, 0, 2 * C); }
  static torch::Tensor v_rows(const torch::Tensor& packed) { return packed.narrow(0, 2 * C, C); }
};

TYPED_TEST_SUITE_P(AttentionContract);

TYPED_TEST_P(AttentionContract, MatchesTheFormulaByHand) {
  const torch::NoGradGuard no_grad;
  for (const auto implementation : kImplementations) {
    for (const bool causal : {true, false}) {
      SCOPED_TRACE(std::string(name_of(implementation)) + (causal ? ", causal" : ""));
      auto module = this->make(implementation, causal);
      const auto dtype = exact_dtype(implementation);
      module->to(dtype);
      const auto x = this->sequence().to(dtype);
      const auto expected =
          attention_by_hand(x, TypeParam::in(module), TypeParam::out(module), this->H, causal);
      EXPECT_TRUE(all_close(module(x), expected.out));
      const auto [y, weights] = module->forward_with_weights(x);
      EXPECT_TRUE(all_close(y, expected.out));
      EXPECT_TRUE(all_close(weights, expected.weights));
    }
  }
}

TYPED_TEST_P(AttentionContract, WeightsArePerHeadCausalAndSumToOne) {
  this->with_each([&](auto module) {
    const auto weights = std::get<1>(module->forward_with_weights(this->sequence()));
    ASSERT_EQ(weights.sizes(), torch::IntArrayRef({this->B, this->H, this->T, this->T}));
    EXPECT_TRUE(all_equal(weights.triu(1), torch::zeros_like(weights)));
    EXPECT_TRUE(all_close(weights.sum(-1), torch::ones({this->B, this->H, this->T})));
    EXPECT_GE(weights.min().template item<float>(), 0.0f);
    EXPECT_LE(weights.max().template item<float>(), 1.0f);
    const auto first_query = weights.select(2, 0);  // [B, H, T]: sees the first key only
    EXPECT_TRUE(all_equal(first_query.select(2, 0), torch::ones({this->B, this->H})));
    EXPECT_GT((weights.select(1, 0) - weights.select(1, 1)).abs().max().template item<float>(),
              1e-3f);
  });
}

TYPED_TEST_P(AttentionContract, EqualScoresSpreadEvenlyOverThePast) {
  this->with_each([&](auto module) {
    const torch::NoGradGuard no_grad;
    auto in = TypeParam::in(module);
    this->qk_rows(in->weight).zero_();
    if (in->bias.defined()) this->qk_rows(in->bias).zero_();
    const auto x = this->sequence();
    const auto [y, weights] = module->forward_with_weights(x);
    const auto count = torch::arange(1, this->T + 1, torch::kFloat).unsqueeze(1);  // [T, 1]
    const auto even = torch::ones({this->T, this->T}).tril() / count;
    EXPECT_TRUE(all_equal(weights, even.expand_as(weights)));
    const auto mean = in(x).chunk(3, -1)[2].cumsum(1) / count;  // of v, so far: [B, T, C]
    EXPECT_TRUE(all_close(y, TypeParam::out(module)(mean)));
    EXPECT_TRUE(all_close(module(x), y));
  });
}

TYPED_TEST_P(AttentionContract, HugeScoresDoNotOpenTheFuture) {
  this->with_each([&](auto module) {
    const torch::NoGradGuard no_grad;
    this->qk_rows(TypeParam::in(module)->weight).mul_(3000);
    const auto x = this->sequence();
    const auto qkv = TypeParam::in(module)(x).chunk(3, -1);
    ASSERT_GT(qkv[0].matmul(qkv[1].transpose(1, 2)).abs().max().template item<float>(), 1e6f);

    const auto [y, weights] = module->forward_with_weights(x);
    EXPECT_TRUE(all_equal(weights.triu(1), torch::zeros_like(weights)));
    EXPECT_TRUE(y.isfinite().all().template item<bool>());
    const auto past = module(x);
    for (int64_t t = 1; t < this->T; ++t) {
      auto changed = x.clone();
      changed.select(1, t).normal_();
      EXPECT_TRUE(all_equal(module(changed).narrow(1, 0, t), past.narrow(1, 0, t))) << t;
    }
  });
}

TYPED_TEST_P(AttentionContract, ASingleTokenAttendsToItself) {
  this->with_each([&](auto module) {
    auto in = TypeParam::in(module);
    auto out = TypeParam::out(module);
    const auto x = torch::randn({this->B, 1, this->C});
    EXPECT_TRUE(all_equal(std::get<1>(module->forward_with_weights(x)),
                          torch::ones({this->B, this->H, 1, 1})));

    const auto v_only = out(in(x).chunk(3, -1)[2]);
    v_only.sum().backward();
    const auto expected = this->v_rows(in->weight.grad()).clone();
    module->zero_grad();
    const auto y = module(x);
    EXPECT_TRUE(all_close(y, v_only));
    y.sum().backward();
    EXPECT_TRUE(all_close(this->v_rows(in->weight.grad()), expected));
    const auto qk_grad = this->qk_rows(in->weight.grad());
    if (module->options.implementation() == Implementation::math) {
      EXPECT_TRUE(all_equal(qk_grad, torch::zeros_like(qk_grad)));
    } else {  // LibTorch's kernel subtracts two sums of the same terms in different order
      EXPECT_TRUE(all_close(qk_grad, torch::zeros_like(qk_grad)));
    }
  });
}

TYPED_TEST_P(AttentionContract, AcceptsAnEmptyBatch) {
  for (const auto implementation : {Implementation::automatic, Implementation::math}) {
    SCOPED_TRACE(name_of(implementation));
    auto module = this->make(implementation);
    const auto x = torch::empty({0, this->T, this->C}).requires_grad_();
    const auto y = module(x);
    EXPECT_EQ(y.sizes(), torch::IntArrayRef({0, this->T, this->C}));
    y.sum().backward();
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    const auto weights = std::get<1>(module->forward_with_weights(x));
    EXPECT_EQ(weights.sizes(), torch::IntArrayRef({0, this->H, this->T, this->T}));
  }
}

TYPED_TEST_P(AttentionContract, BatchRowsAreIndependent) {
  this->with_each([&](auto module) {
    const torch::NoGradGuard no_grad;
    const auto x = torch::randn({3, this->T, this->C});
    const auto y = module(x);
    const auto order = torch::tensor({2, 0, 1});
    EXPECT_TRUE(all_close(module(x.index_select(0, order)), y.index_select(0, order)));

    auto changed = x.clone();
    changed[0].normal_();
    const auto moved = module(changed);
    EXPECT_TRUE(all_equal(moved.narrow(0, 1, 2), y.narrow(0, 1, 2)));
    EXPECT_FALSE(all_close(moved[0], y[0]));
  });
}

TYPED_TEST_P(AttentionContract, AcceptsAnyStrides) {
  const auto transposed = torch::randn({this->T, this->B, this->C}).transpose(0, 1);
  const auto stepped = torch::randn({this->B, this->T, 2 * this->C}).slice(2, 0, 2 * this->C, 2);
  const auto expanded = torch::randn({1, this->T, this->C}).expand({this->B, this->T, this->C});
  const auto grad = torch::randn({this->B, 1, this->C}).expand({this->B, this->T, this->C});
  this->with_each([&](auto module) {
    for (const auto& strided : {transposed, stepped, expanded}) {
      ASSERT_FALSE(strided.is_contiguous());
      const auto x = strided.detach().requires_grad_();
      const auto packed = strided.contiguous().requires_grad_();
      const auto y = module(x);
      const auto expected = module(packed);
      EXPECT_TRUE(all_close(y, expected));
      y.backward(grad);
      expected.backward(grad.contiguous());
      EXPECT_TRUE(all_close(x.grad(), packed.grad()));
    }
  });
}

TYPED_TEST_P(AttentionContract, KeepsDtypeAndMaskThroughConversions) {
  this->with_each([&](auto module) {
    const torch::NoGradGuard no_grad;
    const auto x = this->sequence();
    const auto expected = module(x);
    for (const auto dtype : {torch::kFloat64, torch::kFloat32, torch::kBFloat16}) {
      if (!takes(module->options.implementation(), dtype)) continue;
      module->to(dtype);
      const auto [y, weights] = module->forward_with_weights(x.to(dtype));
      const auto z = module(x.to(dtype));
      EXPECT_EQ(y.scalar_type(), dtype);
      EXPECT_EQ(z.scalar_type(), dtype);
      EXPECT_EQ(weights.scalar_type(), dtype);
      EXPECT_TRUE(all_equal(weights.triu(1), torch::zeros_like(weights)));
      // bfloat16 has 8 bits: 2^-8 of values around 1, from a few roundings in a row.
      const auto tolerance =
          dtype == torch::kBFloat16 ? Tolerance{1.6e-2, 2e-2} : default_tolerance(torch::kFloat32);
      EXPECT_TRUE(all_close(y.to(torch::kFloat32), expected, tolerance)) << dtype;
      EXPECT_TRUE(all_close(z.to(torch::kFloat32), expected, tolerance)) << dtype;
    }
  });
}

TYPED_TEST_P(AttentionContract, PaddedKeysAreNotSeen) {
  for (const auto implementation : kImplementations) {
    SCOPED_TRACE(name_of(implementation));
    auto module = this->make(implementation, /*causal=*/false);
    const auto x = this->sequence();
    const int64_t real = this->T - 2;
    auto mask = torch::zeros({this->B, this->T}, torch::kBool);
    mask[1].narrow(0, real, 2).fill_(true);

    const auto y = module(x, mask);
    const auto whole = module(x);
    const auto cut = module(x.narrow(1, 0, real));
    EXPECT_TRUE(all_close(y[0], whole[0]));                   // nothing is padding there
    EXPECT_TRUE(all_close(y[1].narrow(0, 0, real), cut[1]));  // as if the padding were cut off
    const auto [z, weights] = module->forward_with_weights(x, mask);
    EXPECT_TRUE(all_close(z, y));
    const auto unseen = weights[1].narrow(2, real, 2);  // [H, T, 2]
    EXPECT_TRUE(all_equal(unseen, torch::zeros_like(unseen)));
  }
}

TYPED_TEST_P(AttentionContract, AQueryThatSeesNoKeyGetsZeros) {
  this->with_each([&](auto module) {
    const auto x = this->sequence().requires_grad_();
    auto mask = torch::zeros({this->B, this->T}, torch::kBool);
    mask[1][0].fill_(true);  // the first query's only key
    const auto [y, weights] = module->forward_with_weights(x, mask);
    const auto zeros = TypeParam::out(module)(torch::zeros({this->C}));
    EXPECT_TRUE(all_equal(weights[1].select(1, 0), torch::zeros({this->H, this->T})));
    EXPECT_TRUE(all_equal(weights.triu(1), torch::zeros_like(weights)));
    EXPECT_TRUE(all_close(y[1][0], zeros));
    EXPECT_TRUE(all_close(module(x, mask), y));

    module(x, mask)[1][0].sum().backward();
    EXPECT_TRUE(all_equal(x.grad(), torch::zeros_like(x)));
  });
}

TYPED_TEST_P(AttentionContract, TrainingAndEvalAgreeBitForBitWithoutDropout) {
  this->with_each([&](auto module) {
    const auto x = this->sequence();
    const auto training = module(x);
    module->eval();
    EXPECT_TRUE(all_equal(module(x), training));
  });
}

TYPED_TEST_P(AttentionContract, RunsInsideSequential) {
  auto module = this->make(Implementation::automatic);
  const auto x = this->sequence();
  torch::nn::Sequential stack(module, module);
  EXPECT_TRUE(all_equal(stack->forward(x), module(module(x))));
}

TYPED_TEST_P(AttentionContract, RejectsWhatIsNoSequenceOfItsWidth) {
  auto module = this->make(Implementation::automatic);
  const auto rejects = [&](const torch::Tensor& x, std::initializer_list<std::string> parts) {
    EXPECT_TRUE(mentions(value_error([&] { module(x); }), parts));
    EXPECT_TRUE(mentions(value_error([&] { module->forward_with_weights(x); }), parts));
  };
  rejects(torch::ones({5, this->C}), {"3-D", "[5, 12]"});
  rejects(torch::ones({1, 2, 5, this->C}), {"3-D", "[1, 2, 5, 12]"});
  rejects(torch::ones({2, 5, 13}), {std::string(TypeParam::kWidth) + " (12)", "[2, 5, 13]"});
  rejects(torch::ones({2, 5, this->C}, torch::kLong), {"floating-point", "Long"});
  rejects(torch::Tensor(), {"undefined"});
}

TYPED_TEST_P(AttentionContract, RejectsMasksThatDoNotFit) {
  const auto x = this->sequence();
  this->with_each([&](auto module) {
    const auto rejects = [&](const torch::Tensor& mask, std::initializer_list<std::string> parts) {
      EXPECT_TRUE(mentions(value_error([&] { module(x, mask); }), parts));
      EXPECT_TRUE(mentions(value_error([&] { module->forward_with_weights(x, mask); }), parts));
    };
    rejects(torch::zeros({2, 4}, torch::kBool), {"key_padding_mask", "[2, 5]", "[2, 4]"});
    rejects(torch::zeros({5}, torch::kBool), {"key_padding_mask", "[2, 5]", "[5]"});
    rejects(torch::zeros({2, 5}), {"key_padding_mask must be bool", "Float"});
  });
}

REGISTER_TYPED_TEST_SUITE_P(AttentionContract, MatchesTheFormulaByHand,
                            WeightsArePerHeadCausalAndSumToOne, EqualScoresSpreadEvenlyOverThePast,
                            HugeScoresDoNotOpenTheFuture, ASingleTokenAttendsToItself,
                            AcceptsAnEmptyBatch, BatchRowsAreIndependent, AcceptsAnyStrides,
                            KeepsDtypeAndMaskThroughConversions, PaddedKeysAreNotSeen,
                            AQueryThatSeesNoKeyGetsZeros,
                            TrainingAndEvalAgreeBitForBitWithoutDropout, RunsInsideSequential,
                            RejectsWhatIsNoSequenceOfItsWidth, RejectsMasksThatDoNotFit);

}  // namespace attn::testing
