#include "attn/functional.h"

#include "support/all_close.h"
#include "support/implementations.h"
#include "support/naive_attention.h"
#include "support/random_attention.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <tuple>

namespace attn::testing {
namespace {

using functional::attention;
using functional::attention_with_weights;
using functional::AttentionOptions;
using functional::merge_heads;
using functional::packed_self_attention;
using functional::packed_self_attention_with_weights;
using functional::split_heads;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// bfloat16 keeps 8 bits: scores of about 4 are 2^-7 off, so are the weights, and the output is
/// rounded once more.
Tolerance tolerance_of(torch::Dtype dtype) {
  return dtype == torch::kBFloat16 ? Tolerance{1.6e-2, 2e-2} : default_tolerance(dtype);
}

constexpr torch::Dtype kDtypes[] = {torch::kFloat32, torch::kFloat64, torch::kBFloat16};

bool all_finite(const torch::Tensor& x) {
  return x.isfinite().all().item<bool>();
}

bool all_nan(const torch::Tensor& x) {
  return x.isnan().all().item<bool>();
}

class Attention : public EachImplementation {
 protected:
  void SetUp() override { torch::manual_seed(7); }

  static AttentionOptions options() { return AttentionOptions().implementation(GetParam()); }
};
ATTN_EACH_IMPLEMENTATION(Attention);

class AttentionOfEachDtype
    : public ::testing::TestWithParam<std::tuple<Implementation, torch::Dtype>> {};

std::string case_name(const ::testing::TestParamInfo<AttentionOfEachDtype::ParamType>& info) {
  return std::string(name_of(std::get<0>(info.param))) + '_' +
         c10::toString(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Each, AttentionOfEachDtype,
                         ::testing::Combine(::testing::ValuesIn(kImplementations),
                                            ::testing::ValuesIn(kDtypes)),
                         case_name);

TEST_P(AttentionOfEachDtype, EqualsTheNaiveTwin) {
  const auto [implementation, dtype] = GetParam();
  if (!takes(implementation, dtype)) GTEST_SKIP() << "the fused kernels do not take " << dtype;
  for (auto& [q, k, v, options] : random_problems(dtype)) {
    options.implementation(implementation);
    const auto expected = naive_attention(q, k, v, options).out.to(dtype);
    EXPECT_TRUE(all_close(attention(q, k, v, options), expected, tolerance_of(dtype)))
        << AttentionProblem{q, k, v, options}.describe();
  }
}

TEST_P(AttentionOfEachDtype, QueriesThatSeeNoKeyGiveZeros) {
  const auto [implementation, dtype] = GetParam();
  if (!takes(implementation, dtype)) GTEST_SKIP() << "the fused kernels do not take " << dtype;
  for (const bool causal : {true, false}) {
    auto problem = random_problem(2, 2, 1, 5, 5, 8, causal, /*padded=*/false, dtype);
    auto mask = torch::zeros({2, 5}, torch::kBool);
    mask[0].fill_(true);
    mask[1].narrow(0, 0, 2).fill_(true);
    auto& [q, k, v, options] = problem;
    const auto out =
        attention(q, k, v, options.key_padding_mask(mask).implementation(implementation));
    EXPECT_TRUE(all_equal(out[0], torch::zeros_like(out[0])));
    const auto blind = out[1].narrow(1, 0, causal ? 2 : 0);  // [H, 2, D]
    EXPECT_TRUE(all_equal(blind, torch::zeros_like(blind)));
    EXPECT_GT(out[1].narrow(1, 2, 3).abs().min().item<double>(), 0.0);
    // Fewer keys than queries: the first T - S see nothing.
    const auto late = attention(q, k.narrow(2, 0, 3), v.narrow(2, 0, 3),
                                AttentionOptions().causal(causal).implementation(implementation));
    const auto early = late.narrow(2, 0, causal ? 2 : 0);
    EXPECT_TRUE(all_equal(early, torch::zeros_like(early)));
    EXPECT_GT(late.narrow(2, 2, 3).abs().min().item<double>(), 0.0);
  }
}

TEST_P(AttentionOfEachDtype, TheFutureIsBlockedWhateverTheScores) {
  const auto [implementation, dtype] = GetParam();
  if (!takes(implementation, dtype)) GTEST_SKIP() << "the fused kernels do not take " << dtype;
  const auto options = AttentionOptions().implementation(implementation).scale(1.0);
  const auto v = torch::randn({1, 2, 6, 8}).to(dtype) * 1e4;
  for (const double size : {1e6, -1e6, 1e30}) {
    const auto q = torch::full({1, 2, 6, 8}, 1.0).to(dtype);
    const auto k = torch::randn({1, 2, 6, 8}).to(dtype) * (size / 8.0);
    const auto out = attention(q, k, v, options);
    EXPECT_TRUE(all_finite(out));
    EXPECT_TRUE(all_equal(out.select(2, 0), v.select(2, 0)));  // the first query has one choice
    for (int64_t t = 1; t < 6; ++t) {
      auto other_k = k.clone();
      auto other_v = v.clone();
      other_k.narrow(2, t, 6 - t).mul_(-3.0);
      other_v.narrow(2, t, 6 - t).neg_();
      const auto past = attention(q, other_k, other_v, options).narrow(2, 0, t);
      EXPECT_TRUE(all_equal(past, out.narrow(2, 0, t))) << "size " << size << ", t " << t;
    }
  }
}

TEST_P(Attention, AnyStridesGiveTheSame) {
  const auto transposed = [](int64_t T) { return torch::randn({2, T, 3, 4}).transpose(1, 2); };
  const auto stepped = [](int64_t T) {
    return torch::randn({2, 3, 2 * T, 8}).slice(2, 1, 2 * T, 2).slice(3, 0, 8, 2);
  };
  const auto expanded = [](int64_t T) { return torch::randn({2, 1, T, 4}).expand({2, 3, T, 4}); };
  const auto all_one = [](int64_t T) { return torch::randn({2, 3, 1, 1}).expand({2, 3, T, 4}); };
  const std::function<torch::Tensor(int64_t)> kinds[] = {transposed, stepped, expanded, all_one};
  for (const auto& q_kind : kinds) {
    for (const auto& kv_kind : kinds) {
      const auto q = q_kind(5), k = kv_kind(7), v = kv_kind(7);
      ASSERT_FALSE(q.is_contiguous() || k.is_contiguous());
      const auto mask = (torch::rand({7, 2}) < 0.3).t();
      for (const auto& masked : {options(), options().key_padding_mask(mask)}) {
        EXPECT_TRUE(all_close(attention(q, k, v, masked),
                              attention(q.contiguous(), k.contiguous(), v.contiguous(), masked)));
      }
    }
  }
}

TEST_P(Attention, PackedEqualsSeparate) {
  for (const bool causal : {true, false}) {
    const auto qkv = torch::randn({2, 7, 3 * 12});
    const auto masked =
        options().causal(causal).key_padding_mask(torch::rand({2, 7}) < 0.3).scale(0.4);
    const auto part = [&](int64_t i) { return split_heads(qkv.narrow(2, 12 * i, 12), 3); };
    const auto expected = merge_heads(attention(part(0), part(1), part(2), masked));
    EXPECT_TRUE(all_close(packed_self_attention(qkv, 3, masked), expected));
    const auto [out, weights] = packed_self_attention_with_weights(qkv, 3, masked);
    EXPECT_TRUE(all_close(out, expected));
    EXPECT_TRUE(
        all_equal(weights, std::get<1>(attention_with_weights(part(0), part(1), part(2), masked))));
  }
}

TEST_P(Attention, TheScaleDefaultsToOneOverTheRootOfTheHeadWidth) {
  const auto [q, k, v, unused] = random_problem(2, 2, 2, 4, 4, 16, true, false, torch::kFloat32);
  EXPECT_TRUE(all_equal(attention(q, k, v, options()), attention(q, k, v, options().scale(0.25))));
  EXPECT_FALSE(all_close(attention(q, k, v, options()), attention(q, k, v, options().scale(0.3))));
}

TEST_P(Attention, TheScaleMayBeZeroOrNegative) {
  for (const bool causal : {true, false}) {
    for (const bool padded : {true, false}) {
      auto problem = random_problem(2, 2, 1, 5, 5, 8, causal, padded, torch::kFloat32);
      for (const double scale : {0.0, -0.3}) {
        auto& [q, k, v, masks] = problem;
        masks.implementation(GetParam()).scale(scale);
        EXPECT_TRUE(all_close(attention(q, k, v, masks),
                              naive_attention(q, k, v, masks).out.to(torch::kFloat32)))
            << problem.describe() << ", scale " << scale;
      }
    }
  }
}

TEST_P(Attention, ANaNKeyDoesNotReachTheQueriesBeforeIt) {
  const auto [q, k, v, unused] = random_problem(1, 2, 2, 6, 6, 4, true, false, torch::kFloat32);
  const auto y = attention(q, k, v, options());
  for (int64_t t = 0; t < 6; ++t) {
    auto poisoned = k.clone();
    poisoned.select(2, t).fill_(kNaN);
    const auto out = attention(q, poisoned, v, options());
    EXPECT_TRUE(all_equal(out.narrow(2, 0, t), y.narrow(2, 0, t))) << t;
    EXPECT_TRUE(all_nan(out.narrow(2, t + 1, 5 - t))) << t;
  }
}

TEST_P(Attention, ASeenNaNValueIsNotHidden) {
  const auto [q, k, v, unused] = random_problem(1, 2, 2, 5, 5, 4, true, false, torch::kFloat32);
  auto poisoned = v.clone();
  poisoned.select(2, 2).fill_(kNaN);
  EXPECT_TRUE(all_nan(attention(q, k, poisoned, options()).narrow(2, 2, 3)));
}

TEST_P(Attention, DropoutRepeatsWithTheSeedAndKeepsTheMean) {
  // Values of one: the output is the sum of the weights, whose mean is 1.
  const auto [q, k, unused_v, unused] =
      random_problem(64, 4, 4, 16, 16, 8, true, false, torch::kFloat32);
  const auto v = torch::ones_like(k);
  const auto dropped = options().dropout_p(0.4);
  torch::manual_seed(1);
  const auto out = attention(q, k, v, dropped);
  const auto next = attention(q, k, v, dropped);
  torch::manual_seed(1);
  EXPECT_TRUE(all_equal(attention(q, k, v, dropped), out));
  EXPECT_FALSE(all_close(next, out));
  const auto sums = out.select(3, 0).flatten();  // 64 · 4 · 16 independent rows
  EXPECT_NEAR(sums.mean().item<double>(), 1.0, 6 * sums.std().item<double>() / 64.0);
}

TEST_P(Attention, DropoutOfOneGivesZeros) {
  const auto [q, k, v, unused] = random_problem(2, 2, 1, 5, 5, 4, true, true, torch::kFloat32);
  const auto out = attention(q, k, v, options().dropout_p(1.0));
  EXPECT_TRUE(all_equal(out, torch::zeros_like(q)));
}

TEST_P(Attention, LeavesThreadsGradModeAndWithoutDropoutTheGeneratorAlone) {
  const auto [q, k, v, unused] = random_problem(2, 2, 1, 5, 6, 4, true, true, torch::kFloat32);
  const auto generator = at::detail::getDefaultCPUGenerator();
  const auto state = generator.get_state();
  const auto threads = at::get_num_threads();
  for (const bool grad_mode : {true, false}) {
    const at::AutoGradMode guard(grad_mode);
    attention(q, k, v, options().dropout_p(0.0));
    EXPECT_EQ(at::GradMode::is_enabled(), grad_mode);
  }
  EXPECT_EQ(at::get_num_threads(), threads);
  EXPECT_TRUE(all_equal(generator.get_state(), state));
}

AttentionOptions math() {
  return AttentionOptions().implementation(Implementation::math);
}

// The fused operation adds its mask to the scores, which NaN survives, and LibTorch's CPU kernel
// gives zeros where every score is NaN: so these hold for the math alone.
TEST(MathAttention, KeepsANaNWhereTheMaskAllowsIt) {
  torch::manual_seed(7);
  const auto [q, k, v, unused] = random_problem(1, 2, 2, 4, 6, 4, true, false, torch::kFloat32);
  const auto y = attention(q, k, v, math());
  for (int64_t s = 0; s < 6; ++s) {
    auto poisoned = k.clone();
    poisoned.select(2, s).fill_(kNaN);
    const auto out = attention(q, poisoned, v, math());
    const int64_t first = std::max<int64_t>(s - 2, 0);  // query i sees keys 0 .. 2 + i
    EXPECT_TRUE(all_equal(out.narrow(2, 0, first), y.narrow(2, 0, first))) << s;
    EXPECT_TRUE(all_nan(out.narrow(2, first, 4 - first))) << s;

    auto mask = torch::zeros({1, 6}, torch::kBool);
    mask[0][s] = true;
    const auto padded = math().key_padding_mask(mask);
    EXPECT_TRUE(all_equal(attention(q, poisoned, v, padded), attention(q, k, v, padded))) << s;
  }
}

TEST(MathAttention, ANaNQueryIsAloneWithIt) {
  torch::manual_seed(7);
  auto [q, k, v, unused] = random_problem(1, 2, 2, 5, 5, 4, true, false, torch::kFloat32);
  const auto y = attention(q, k, v, math());
  q.select(2, 2).fill_(kNaN);
  const auto out = attention(q, k, v, math());
  EXPECT_TRUE(all_nan(out.select(2, 2)));
  const auto others = torch::tensor({0, 1, 3, 4});
  EXPECT_TRUE(all_equal(out.index_select(2, others), y.index_select(2, others)));
}

// IEEE: 0 · NaN is NaN, and PyTorch multiplies.
TEST(MathAttention, AMaskedNaNValueMeetsItsZeroWeight) {
  torch::manual_seed(7);
  auto [q, k, v, unused] = random_problem(1, 2, 2, 5, 5, 4, true, false, torch::kFloat32);
  v.select(2, 4).fill_(kNaN);
  EXPECT_TRUE(all_nan(attention(q, k, v, math())));
}

TEST(AttentionOfNothing, IsEmptyOrZero) {
  for (const auto implementation : {Implementation::automatic, Implementation::math}) {
    const auto run = [&](int64_t B, int64_t T, int64_t S, bool padded) {
      const auto problem = random_problem(B, 2, 2, T, S, 4, true, false, torch::kFloat32);
      const auto mask = padded ? torch::zeros({B, S}, torch::kBool) : torch::Tensor();
      return attention(problem.q, problem.k, problem.v,
                       AttentionOptions().implementation(implementation).key_padding_mask(mask));
    };
    for (const bool padded : {true, false}) {
      EXPECT_EQ(run(0, 3, 3, padded).sizes(), torch::IntArrayRef({0, 2, 3, 4}));
      EXPECT_EQ(run(2, 0, 3, padded).sizes(), torch::IntArrayRef({2, 2, 0, 4}));
      EXPECT_EQ(run(2, 0, 0, padded).sizes(), torch::IntArrayRef({2, 2, 0, 4}));
      EXPECT_TRUE(all_equal(run(2, 1, 0, padded), torch::zeros({2, 2, 1, 4})));
      EXPECT_TRUE(all_equal(run(2, 3, 0, padded), torch::zeros({2, 2, 3, 4})));
    }
  }
}

class AttentionWeights : public ::testing::TestWithParam<torch::Dtype> {
 protected:
  void SetUp() override { torch::manual_seed(7); }
};
INSTANTIATE_TEST_SUITE_P(Each, AttentionWeights, ::testing::ValuesIn(kDtypes),
                         [](const auto& value) { return std::string(c10::toString(value.param)); });

TEST_P(AttentionWeights, EqualTheNaiveTwinsWithTheOutput) {
  const auto dtype = GetParam();
  for (const auto& [q, k, v, options] : random_problems(dtype)) {
    const auto [out, weights] = attention_with_weights(q, k, v, options);
    const auto expected = naive_attention(q, k, v, options);
    EXPECT_TRUE(all_close(out, expected.out.to(dtype), tolerance_of(dtype)));
    EXPECT_TRUE(all_close(weights, expected.weights.to(dtype), tolerance_of(dtype)));
    // What the mask takes is exactly nothing, in every dtype.
    EXPECT_EQ(weights.masked_select(expected.weights == 0).count_nonzero().item<int64_t>(), 0);
    EXPECT_GE(weights.min().item<double>(), 0.0);
    EXPECT_LE(weights.max().item<double>(), 1.0);
  }
}

TEST_P(AttentionWeights, SumToOneOrNothing) {
  for (const auto& [q, k, v, options] : random_problems(GetParam())) {
    const auto sums =
        std::get<1>(attention_with_weights(q, k, v, options)).to(torch::kFloat64).sum(-1);
    const auto expected = naive_attention(q, k, v, options).weights.sum(-1).round();
    // In bfloat16 each of S weights is rounded by up to 2^-9 of itself.
    const double rounding = GetParam() == torch::kBFloat16 ? 4e-3 : 1e-6;
    EXPECT_TRUE(all_close(sums, expected, {0.0, rounding}));
  }
}

TEST_P(AttentionWeights, HugeScoresDoNotOpenTheFuture) {
  for (const double size : {1e6, -1e6, 1e30}) {
    const auto q = torch::ones({1, 1, 8, 4}).to(GetParam());
    const auto k = torch::randn({1, 1, 8, 4}).to(GetParam()) * size;
    const auto weights = std::get<1>(attention_with_weights(q, k, k));
    EXPECT_TRUE(all_finite(weights));
    EXPECT_TRUE(all_equal(weights.triu(1), torch::zeros_like(weights)));
    EXPECT_EQ(weights[0][0][0][0].item<double>(), 1.0);
  }
}

TEST(AttentionWeightsAfterDropout, AreZeroOrScaledAndMakeTheOutput) {
  torch::manual_seed(7);
  const auto [q, k, v, options] = random_problem(8, 4, 2, 9, 9, 8, true, true, torch::kFloat64);
  const auto full = std::get<1>(attention_with_weights(q, k, v, options));
  const auto [out, weights] =
      attention_with_weights(q, k, v, AttentionOptions(options).dropout_p(0.3));
  const auto kept = weights != 0;
  EXPECT_TRUE(all_close(weights, torch::where(kept, full / 0.7, torch::zeros_like(full))));
  EXPECT_TRUE(all_close(out, weights.matmul(v.repeat_interleave(2, 1))));
  // About 500 weights that the masks leave; five standard deviations of 0.02.
  const double share = kept.sum().item<double>() / (full != 0).sum().item<double>();
  EXPECT_NEAR(share, 0.7, 0.1);
  const auto none =
      std::get<1>(attention_with_weights(q, k, v, AttentionOptions(options).dropout_p(1.0)));
  EXPECT_TRUE(all_equal(none, torch::zeros_like(full)));
}

// q · k = 230400 is beyond float16's 65504, the scaled score is not.
TEST(AttentionInHalf, ScalesBeforeItOverflows) {
  const auto q = torch::full({1, 1, 4, 64}, 60.0, torch::kHalf);
  const auto v = torch::randn({1, 1, 4, 64}).to(torch::kHalf);
  const auto count = torch::arange(1, 5).view({4, 1});
  const auto mean = (v.to(torch::kFloat32).cumsum(2) / count).to(torch::kHalf);
  const auto [out, weights] = attention_with_weights(q, q, v);
  EXPECT_TRUE(all_equal(weights.triu(1), torch::zeros_like(weights)));
  EXPECT_TRUE(all_close(out, mean, {1e-3, 1e-3}));
  for (const auto implementation : kImplementations) {
    if (!takes(implementation, torch::kFloat16)) continue;
    EXPECT_TRUE(all_close(attention(q, q, v, AttentionOptions().implementation(implementation)),
                          mean, {1e-3, 1e-3}))
        << name_of(implementation);
  }
}

TEST(AttentionOptions, AreCausalWithoutDropoutAndChooseForThemselves) {
  const AttentionOptions defaults;
  EXPECT_TRUE(defaults.causal());
  EXPECT_EQ(defaults.dropout_p(), 0.0);
  EXPECT_FALSE(defaults.scale().has_value());
  EXPECT_FALSE(defaults.key_padding_mask().defined());
  EXPECT_EQ(defaults.implementation(), Implementation::automatic);

  const auto mask = torch::zeros({1, 2}, torch::kBool);
  const auto set = AttentionOptions()
                       .causal(false)
                       .dropout_p(0.5)
                       .scale(2.0)
                       .key_padding_mask(mask)
                       .implementation(Implementation::math);
  EXPECT_FALSE(set.causal());
  EXPECT_EQ(set.dropout_p(), 0.5);
  EXPECT_EQ(set.scale(), 2.0);
  EXPECT_TRUE(set.key_padding_mask().is_same(mask));
  EXPECT_EQ(set.implementation(), Implementation::math);
}

TEST(SplitHeads, IsAViewOfTheWidthInOrderAndMergeHeadsUndoesIt) {
  const auto x = torch::arange(2 * 3 * 8).view({2, 3, 8});
  const auto heads = split_heads(x, 4);  // [B, H, T, D]
  ASSERT_EQ(heads.sizes(), torch::IntArrayRef({2, 4, 3, 2}));
  EXPECT_EQ(heads.data_ptr(), x.data_ptr());
  EXPECT_TRUE(all_equal(heads[1][2][0], x[1][0].narrow(0, 4, 2)));
  EXPECT_TRUE(all_equal(merge_heads(heads), x));
  EXPECT_TRUE(all_equal(merge_heads(split_heads(x.transpose(0, 1), 2)), x.transpose(0, 1)));
  EXPECT_EQ(split_heads(torch::zeros({0, 3, 8}), 4).sizes(), torch::IntArrayRef({0, 4, 3, 2}));
}

}  // namespace
}  // namespace attn::testing
