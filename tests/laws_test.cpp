// What holds for every module, whatever its weights.

#include "support/all_close.h"
#include "support/implementations.h"
#include "support/modules.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <limits>
#include <thread>
#include <tuple>
#include <vector>

namespace attn::testing {
namespace {

constexpr torch::Dtype kDtypes[] = {torch::kFloat32, torch::kFloat64, torch::kBFloat16};

class Law : public ::testing::TestWithParam<std::tuple<ModuleCase, Implementation>> {
 protected:
  static constexpr int64_t B = 2, T = 6;

  void SetUp() override { torch::manual_seed(7); }

  const ModuleCase& subject() const { return std::get<0>(GetParam()); }
  Implementation implementation() const { return std::get<1>(GetParam()); }

  torch::nn::AnyModule make(ModuleConfig config = {}, torch::Dtype dtype = torch::kFloat32) const {
    config.implementation = implementation();
    auto module = subject().make(config);
    module.ptr()->to(dtype);
    return module;
  }
  torch::Tensor run(torch::nn::AnyModule& module, const torch::Tensor& x,
                    const torch::Tensor& key_padding_mask = {}) const {
    return subject().run(module, x, key_padding_mask);
  }
};

/// Modules whose positions see one another.
class AttentionLaw : public Law {};
/// Modules that do not know where a token stands.
class PositionFreeLaw : public Law {};
/// Modules that take vectors.
class VectorLaw : public Law {};

auto cases(bool (*holds)(const ModuleCase&)) {
  return ::testing::Combine(::testing::ValuesIn(modules_where(holds)),
                            ::testing::ValuesIn(kImplementations));
}
std::string law_name(const ::testing::TestParamInfo<Law::ParamType>& info) {
  return std::get<0>(info.param).name + "_" + name_of(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Each, Law, cases([](const auto& m) { return m.input != Input::length; }),
                         law_name);
INSTANTIATE_TEST_SUITE_P(Each, AttentionLaw, cases([](const auto& m) { return m.attends; }),
                         law_name);
INSTANTIATE_TEST_SUITE_P(Each, PositionFreeLaw, cases([](const auto& m) { return !m.positions; }),
                         law_name);
INSTANTIATE_TEST_SUITE_P(Each, VectorLaw,
                         cases([](const auto& m) { return m.input == Input::sequence; }), law_name);

TEST_P(Law, TheFutureDoesNotChangeThePast) {
  struct Mode {
    bool training;
    double dropout;
  };
  for (const auto dtype : kDtypes) {
    if (!takes(implementation(), dtype)) continue;
    for (const auto mode : {Mode{false, 0.0}, Mode{true, 0.0}, Mode{true, 0.3}}) {
      auto module = make({.dropout = mode.dropout}, dtype);
      module.ptr()->train(mode.training);
      const auto run_seeded = [&](const torch::Tensor& input) {
        torch::manual_seed(3);  // the same dropout masks
        return run(module, input);
      };
      const auto x = subject().random_input(B, T, dtype);
      const auto y = run_seeded(x);
      for (int64_t t = 0; t < T; ++t) {
        const auto changed = run_seeded(subject().with_other_token(x, t));
        EXPECT_TRUE(torch::equal(changed.narrow(1, 0, t), y.narrow(1, 0, t)))
            << dtype << ", training " << mode.training << ", dropout " << mode.dropout << ", t "
            << t;
        EXPECT_FALSE(torch::equal(changed.select(1, t), y.select(1, t))) << dtype << ", t " << t;
      }
    }
  }
}

TEST_P(AttentionLaw, WithoutCausalityEveryPositionSeesEveryOther) {
  if (subject().name == "GPT") GTEST_SKIP() << "GPT is always causal";
  auto module = make({.causal = false});
  const auto x = subject().random_input(B, T);
  const auto y = run(module, x);
  for (int64_t t = 0; t < T; ++t) {
    const auto moved =
        (run(module, subject().with_other_token(x, t)) - y).abs().amax({0, 2});  // [T]
    EXPECT_GT(moved.min().item<float>(), 0.0f) << t;
  }
}

TEST_P(AttentionLaw, ThePastReachesTheFuture) {
  auto module = make();
  const auto x = subject().random_input(B, T);
  const auto y = run(module, x);
  for (int64_t t = 0; t < T; ++t) {
    const auto moved =
        (run(module, subject().with_other_token(x, t)) - y).abs().amax({0, 2});  // [T]
    EXPECT_GT(moved.narrow(0, t, T - t).min().item<float>(), 0.0f) << t;
  }
}

TEST_P(PositionFreeLaw, WithoutCausalityPermutingTokensPermutesTheOutput) {
  const auto dtype = exact_dtype(implementation());
  auto module = make({.causal = false}, dtype);
  const auto x = subject().random_input(B, T, dtype);
  const auto order = torch::tensor({3, 0, 5, 1, 4, 2});
  EXPECT_TRUE(
      all_close(run(module, x.index_select(1, order)), run(module, x).index_select(1, order)));
}

TEST_P(AttentionLaw, APaddedRowEqualsTheRowWithoutPadding) {
  for (const bool causal : {true, false}) {
    for (const bool left : {true, false}) {
      SCOPED_TRACE(std::string(left ? "left" : "right") + (causal ? ", causal" : ""));
      auto module = make({.causal = causal});
      const auto x = subject().random_input(B, T);
      const int64_t begin = left ? 2 : 0, real = T - 2;
      auto mask = torch::ones({B, T}, torch::kBool);
      mask[0].fill_(false);
      mask[1].narrow(0, begin, real).fill_(false);

      const auto y = run(module, x, mask);
      EXPECT_TRUE(y.isfinite().all().item<bool>());
      EXPECT_TRUE(all_close(y[0], run(module, x)[0]));
      EXPECT_TRUE(all_close(y[1].narrow(0, begin, real), run(module, x.narrow(1, begin, real))[1]));
      // What stands at padded positions is nothing to the real ones.
      auto other = x;
      for (int64_t t = 0; t < T; ++t) {
        if (mask[1][t].item<bool>()) other = subject().with_other_token(other, t);
      }
      EXPECT_TRUE(torch::equal(run(module, other, mask)[1].narrow(0, begin, real),
                               y[1].narrow(0, begin, real)));
      y.sum().backward();
      for (const auto& parameter : module.ptr()->named_parameters()) {
        EXPECT_TRUE(parameter.value().grad().isfinite().all().item<bool>()) << parameter.key();
      }
    }
  }
}

TEST_P(AttentionLaw, AWhollyPaddedRowStaysFiniteInEveryDtypeAndMode) {
  for (const auto dtype : kDtypes) {
    if (!takes(implementation(), dtype)) continue;
    for (const bool training : {true, false}) {
      auto module = make({}, dtype);
      module.ptr()->train(training);
      const auto x = subject().random_input(B, T, dtype);
      auto mask = torch::zeros({B, T}, torch::kBool);
      mask[0].fill_(true);
      const auto y = run(module, x, mask);
      EXPECT_TRUE(y.isfinite().all().item<bool>()) << dtype;
      y.sum().backward();
      for (const auto& parameter : module.ptr()->named_parameters()) {
        EXPECT_TRUE(parameter.value().grad().isfinite().all().item<bool>())
            << dtype << ' ' << parameter.key();
      }
    }
  }
}

TEST_P(Law, BatchRowsKnowNothingOfOneAnother) {
  for (const bool causal : {true, false}) {
    auto module = make({.causal = causal});
    const auto x = subject().random_input(3, T);
    const auto y = run(module, x);
    auto other = subject().random_input(3, T);
    other[1].copy_(x[1]);
    EXPECT_TRUE(torch::equal(run(module, other)[1], y[1]));
    const auto order = torch::tensor({2, 0, 1});
    EXPECT_TRUE(
        all_close(run(module, x.index_select(0, order)), y.index_select(0, order), {1e-5, 1e-5}));
  }
}

// Not bit for bit: a matrix product may add in another order for another number of rows.
TEST_P(Law, ARowAloneEqualsTheRowInABatch) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    if (!takes(implementation(), dtype)) continue;
    auto module = make({}, dtype);
    const auto x = subject().random_input(8, T, dtype);
    const auto y = run(module, x);
    const double rounding = dtype == torch::kFloat32 ? 1e-5 : 1e-12;
    for (int64_t b = 0; b < 8; ++b) {
      EXPECT_TRUE(all_close(run(module, x.narrow(0, b, 1))[0], y[b], {rounding, rounding})) << b;
    }
  }
}

TEST_P(Law, WithoutDropoutTrainingEqualsEvalBitForBit) {
  for (const auto dtype : kDtypes) {
    if (!takes(implementation(), dtype)) continue;
    auto module = make({}, dtype);
    const auto x = subject().random_input(B, T, dtype);
    module.ptr()->train();
    const auto training = run(module, x);
    module.ptr()->eval();
    EXPECT_TRUE(torch::equal(run(module, x), training)) << dtype;
    // To rounding only: a small self-attention that needs no gradient is one call of its own.
    const double rounding = dtype == torch::kFloat64 ? 1e-12 : 1e-5;
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(all_close(run(module, x), training.detach(), {rounding, rounding}))
        << dtype << ", without gradients";
  }
}

TEST_P(Law, EvalIgnoresDropout) {
  torch::manual_seed(8);
  auto without = make();
  torch::manual_seed(8);  // the same weights
  auto with = make({.dropout = 0.9});
  const auto x = subject().random_input(B, T);
  const auto y = run(without, x);
  with.ptr()->eval();
  EXPECT_TRUE(torch::equal(run(with, x), y));
  with.ptr()->train();
  EXPECT_EQ(torch::equal(run(with, x), y), !subject().drops);
}

TEST_P(VectorLaw, ANaNShowsWhereverItsTokenIsSeen) {
  auto module = make();
  auto x = subject().random_input(B, T);
  x.select(1, 3).fill_(std::numeric_limits<float>::quiet_NaN());
  const auto y = run(module, x);
  const auto seeing = y.narrow(1, 3, subject().attends ? T - 3 : 1);
  EXPECT_TRUE(seeing.isnan().all().item<bool>());
}

TEST_P(Law, LeavesThreadsGradModeAndInEvalTheGeneratorAlone) {
  auto module = make({.dropout = 0.5});
  module.ptr()->eval();
  const auto x = subject().random_input(B, T);
  const auto generator = at::detail::getDefaultCPUGenerator();
  const auto state = generator.get_state();
  const auto threads = at::get_num_threads();
  run(module, x);
  EXPECT_TRUE(torch::equal(generator.get_state(), state));
  EXPECT_EQ(at::get_num_threads(), threads);
  EXPECT_TRUE(at::GradMode::is_enabled());
  const torch::NoGradGuard no_grad;
  run(module, x);
  EXPECT_FALSE(at::GradMode::is_enabled());
}

TEST_P(Law, ThreadsMayShareAModelInEval) {
  auto module = make({.dropout = 0.5});
  module.ptr()->eval();
  const auto x = subject().random_input(B, T);
  const torch::NoGradGuard no_grad;
  const auto y = run(module, x);
  std::vector<torch::Tensor> results(4 * 16);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const torch::NoGradGuard own_no_grad;  // a thread does not inherit its parent's
      for (size_t n = 0; n < 16; ++n) results[16 * i + n] = run(module, x);
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_TRUE(torch::equal(result, y));
}

}  // namespace
}  // namespace attn::testing
