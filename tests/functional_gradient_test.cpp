#include "attn/functional.h"
#include "support/all_close.h"
#include "support/gradcheck.h"
#include "support/implementations.h"
#include "support/naive_attention.h"
#include "support/random_attention.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <optional>

namespace attn::testing {
namespace {

using functional::attention;
using functional::attention_with_weights;
using functional::AttentionOptions;
using functional::packed_self_attention;
using functional::split_heads;

/// Gradients of attention for an upstream gradient, in the inputs' dtype.
NaiveGradients gradients(const AttentionProblem& problem, const torch::Tensor& upstream) {
  const auto leaf = [](const torch::Tensor& x) { return x.detach().requires_grad_(); };
  const auto q = leaf(problem.q), k = leaf(problem.k), v = leaf(problem.v);
  attention(q, k, v, problem.options).backward(upstream);
  return {q.grad(), k.grad(), v.grad()};
}

::testing::AssertionResult gradients_close(const NaiveGradients& actual,
                                           const NaiveGradients& expected, Tolerance tolerance) {
  if (auto q = all_close(actual.q, expected.q, tolerance); !q) return q << " in q's";
  if (auto k = all_close(actual.k, expected.k, tolerance); !k) return k << " in k's";
  if (auto v = all_close(actual.v, expected.v, tolerance); !v) return v << " in v's";
  return ::testing::AssertionSuccess();
}

/// Attention as a function of q, k and v alone.
TensorFunction attention_of(const AttentionOptions& options) {
  return [options](const Tensors& x) { return attention(x[0], x[1], x[2], options); };
}

class AttentionGradient : public EachImplementation {
 protected:
  void SetUp() override { torch::manual_seed(7); }

  AttentionProblem problem(int64_t T, int64_t S, bool causal, bool padded,
                           std::optional<torch::Dtype> wanted = {}) {
    const auto dtype = wanted.value_or(exact_dtype(GetParam()));
    auto made = random_problem(2, 4, 2, T, S, 3, causal, padded, dtype);
    made.options.implementation(GetParam());
    return made;
  }
};
ATTN_EACH_IMPLEMENTATION(AttentionGradient);

TEST_P(AttentionGradient, EqualsTheNaiveTwins) {
  for (const auto dtype : {torch::kFloat64, torch::kFloat32}) {
    if (!takes(GetParam(), dtype)) continue;
    for (auto& problem : random_problems(dtype, /*count=*/12)) {
      const auto& [q, k, v, options] = problem;
      problem.options.implementation(GetParam());
      const auto upstream = torch::randn_like(q);
      auto expected = naive_attention_backward(upstream, q, k, v, options);
      expected = {expected.q.to(dtype), expected.k.to(dtype), expected.v.to(dtype)};
      // Gradients of a key add over up to 130 queries.
      const auto tolerance =
          dtype == torch::kFloat32 ? Tolerance{1.3e-6, 5e-5} : default_tolerance(dtype);
      EXPECT_TRUE(gradients_close(gradients(problem, upstream), expected, tolerance))
          << problem.describe();
    }
  }
}

TEST_P(AttentionGradient, EqualsFiniteDifferences) {
  if (!takes(GetParam(), torch::kFloat64)) GTEST_SKIP() << "finite differences need float64";
  for (const bool causal : {true, false}) {
    for (const bool padded : {true, false}) {
      const auto [q, k, v, options] = problem(3, 4, causal, padded);
      EXPECT_TRUE(gradcheck(attention_of(options), {q, k, v}));
    }
  }
  const auto options = AttentionOptions().implementation(GetParam());
  EXPECT_TRUE(gradcheck([&](const Tensors& x) { return packed_self_attention(x[0], 2, options); },
                        {torch::randn({2, 4, 12}, torch::kFloat64)}));
}

// Where a kernel has no second derivative it must say so: a wrong number would go unnoticed.
TEST_P(AttentionGradient, SecondDerivativesAreRightOrRefused) {
  if (!takes(GetParam(), torch::kFloat64)) GTEST_SKIP() << "finite differences need float64";
  for (const bool padded : {true, false}) {
    const auto [q, k, v, options] = problem(3, 3, /*causal=*/true, padded);
    try {
      EXPECT_TRUE(gradgradcheck(attention_of(options), {q, k, v}));
    } catch (const c10::Error& error) {
      EXPECT_NE(GetParam(), Implementation::math) << error.what_without_backtrace();
    }
  }
}

TEST_P(AttentionGradient, IsZeroForQueriesThatSeeNothingAndKeysThatNoneSees) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16}) {
    if (!takes(GetParam(), dtype)) continue;
    for (const bool causal : {true, false}) {
      auto left_padded = problem(5, 5, causal, /*padded=*/false, dtype);
      auto mask = torch::zeros({2, 5}, torch::kBool);
      mask[0].fill_(true);
      mask[1].narrow(0, 0, 2).fill_(true);
      left_padded.options.key_padding_mask(mask);
      const auto grad = gradients(left_padded, torch::randn({2, 4, 5, 3}).to(dtype));
      for (const auto& g : {grad.q, grad.k, grad.v}) {
        EXPECT_TRUE(g.isfinite().all().item<bool>());
        EXPECT_TRUE(all_equal(g[0], torch::zeros_like(g[0])));
        EXPECT_GT(g[1].narrow(1, 2, 3).abs().max().item<double>(), 0.0);
      }
      const auto unseen = [](const torch::Tensor& g) { return g[1].narrow(1, 0, 2); };
      const auto nothing = torch::zeros_like(unseen(grad.k));
      EXPECT_TRUE(all_equal(unseen(grad.k), nothing));
      EXPECT_TRUE(all_equal(unseen(grad.v), nothing));
      if (causal) {
        EXPECT_TRUE(all_equal(unseen(grad.q), torch::zeros_like(unseen(grad.q))));
      }
    }
  }
}

TEST_P(AttentionGradient, AcceptsAnyStridesOfTheUpstreamGradientAndTheInputs) {
  for (const bool padded : {true, false}) {
    const auto dense = problem(5, 5, /*causal=*/true, padded);
    auto strided = dense;
    for (auto* x : {&strided.q, &strided.k, &strided.v}) {
      *x = x->transpose(1, 2).contiguous().transpose(1, 2);  // [B, H, T, D], heads innermost
    }
    ASSERT_FALSE(strided.q.is_contiguous());
    const auto expanded = torch::randn({2, 1, 5, 1}, exact_dtype(GetParam())).expand({2, 4, 5, 3});
    const auto transposed = torch::randn({2, 5, 4, 3}, exact_dtype(GetParam())).transpose(1, 2);
    for (const auto& upstream : {expanded, transposed}) {
      const auto expected = gradients(dense, upstream.contiguous());
      const auto tolerance = default_tolerance(exact_dtype(GetParam()));
      EXPECT_TRUE(gradients_close(gradients(dense, upstream), expected, tolerance));
      EXPECT_TRUE(gradients_close(gradients(strided, upstream), expected, tolerance));
    }
  }
}

TEST_P(AttentionGradient, OfThePackedInputIsTheThreePartsSideBySide) {
  const auto options = AttentionOptions().implementation(GetParam());
  const auto dtype = exact_dtype(GetParam());
  const auto qkv = torch::randn({2, 5, 36}, dtype).requires_grad_();
  const auto upstream = torch::randn({2, 5, 12}, dtype);
  packed_self_attention(qkv, 3, options).backward(upstream);

  const auto part = [&](int64_t i) { return split_heads(qkv.detach().narrow(2, 12 * i, 12), 3); };
  const auto grad = naive_attention_backward(split_heads(upstream, 3), part(0), part(1), part(2));
  const auto merged = [](const torch::Tensor& x) { return functional::merge_heads(x); };
  EXPECT_TRUE(all_close(
      qkv.grad(), torch::cat({merged(grad.q), merged(grad.k), merged(grad.v)}, -1).to(dtype)));
}

TEST_P(AttentionGradient, OnlyWhatAsksForAGradientGetsOne) {
  const auto [q, k, v, options] = problem(4, 4, /*causal=*/true, /*padded=*/true);
  EXPECT_FALSE(attention(q, k, v, options).requires_grad());
  const auto learned = v.clone().requires_grad_();
  const auto upstream = torch::randn_like(q);
  attention(q, k, learned, options).backward(upstream);
  const auto expected = naive_attention_backward(upstream, q, k, v, options).v.to(v.dtype());
  EXPECT_TRUE(all_close(learned.grad(), expected));
}

TEST_P(AttentionGradient, FollowsTheDroppedWeights) {
  if (!takes(GetParam(), torch::kFloat64)) GTEST_SKIP() << "finite differences need float64";
  const auto [q, k, v, options] = problem(6, 6, /*causal=*/true, /*padded=*/false);
  const auto dropped = attention_of(AttentionOptions(options).dropout_p(0.4));
  // The seed is set in each evaluation, so the function is the same one at every point.
  const TensorFunction seeded = [&](const Tensors& x) {
    torch::manual_seed(11);
    return dropped(x);
  };
  EXPECT_TRUE(gradcheck(seeded, {q, k, v}));
}

// The fused backward is no sum of ATen operations: its second derivative goes through the math.
TEST(FusedSecondDerivatives, EqualTheMaths) {
  torch::manual_seed(7);
  const auto qkv = torch::randn({2, 6, 36}).requires_grad_();
  const auto penalty = [&](Implementation implementation) {
    const auto y = packed_self_attention(qkv, 3, AttentionOptions().implementation(implementation));
    const auto grad = torch::autograd::grad({y.square().sum()}, {qkv}, {}, {}, true)[0];
    return torch::autograd::grad({grad.square().sum()}, {qkv})[0];
  };
  EXPECT_TRUE(all_close(penalty(Implementation::fused), penalty(Implementation::math),
                        {1e-4, 1e-4}));  // sums of products of four rounded factors
}

TEST(FusedSecondDerivatives, AreRefusedWithDropout) {
  const auto qkv = torch::randn({2, 6, 36}).requires_grad_();
  const auto y = packed_self_attention(qkv, 3, AttentionOptions().dropout_p(0.5));
  EXPECT_THROW(torch::autograd::grad({y.sum()}, {qkv}, {}, {}, /*create_graph=*/true),
               c10::NotImplementedError);
}

TEST(AttentionWeightsGradient, EqualsFiniteDifferencesTwice) {
  torch::manual_seed(7);
  const auto problem = random_problem(2, 2, 1, 3, 3, 2, true, true, torch::kFloat64);
  const TensorFunction both = [&](const Tensors& x) {
    const auto [out, weights] = attention_with_weights(x[0], x[1], x[2], problem.options);
    return torch::cat({out, weights}, -1);
  };
  EXPECT_TRUE(gradcheck(both, {problem.q, problem.k, problem.v}));
  EXPECT_TRUE(gradgradcheck(both, {problem.q, problem.k, problem.v}));
}

}  // namespace
}  // namespace attn::testing
