// What only a GPU can show. Every case skips where LibTorch has no CUDA device.

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/implementations.h"
#include "support/mentions.h"
#include "support/modules.h"
#include "support/naive_attention.h"
#include "support/random_attention.h"

#include <attn/state_dict.h>

#include <ATen/Context.h>
#include <torch/cuda.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace attn::testing {
namespace {

using functional::attention;
using functional::attention_with_weights;
using functional::AttentionOptions;

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
    // TF32 keeps 10 bits of float32's 23; these are the defaults, said aloud.
    at::globalContext().setAllowTF32CuBLAS(false);
    torch::manual_seed(7);
  }

  static torch::Tensor cuda(const torch::Tensor& x) { return x.to(torch::kCUDA); }

  static AttentionProblem cuda(AttentionProblem problem) {
    if (const auto mask = problem.options.key_padding_mask(); mask.defined()) {
      problem.options.key_padding_mask(cuda(mask));
    }
    return {cuda(problem.q), cuda(problem.k), cuda(problem.v), problem.options};
  }

  static bool all_finite(const torch::Tensor& x) { return x.isfinite().all().item<bool>(); }

  /// float32 sums of up to 530 terms in another order; 8 bits; 11 bits.
  static Tolerance tolerance_of(torch::Dtype dtype) {
    switch (dtype) {
      case torch::kBFloat16:
        return {1.6e-2, 3e-2};
      case torch::kFloat16:
        return {1e-3, 5e-3};
      case torch::kFloat32:
        return {1e-5, 2e-5};
      default:
        return default_tolerance(dtype);
    }
  }
};

TEST_F(Cuda, AttentionEqualsTheNaiveTwin) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kFloat16}) {
    for (auto& problem : random_problems(dtype, /*count=*/8)) {
      const auto expected =
          naive_attention(problem.q, problem.k, problem.v, problem.options).out.to(dtype);
      for (const auto implementation : kImplementations) {
        problem.options.implementation(implementation);
        const auto [q, k, v, options] = cuda(problem);
        const auto out = attention(q, k, v, options);
        EXPECT_TRUE(out.is_cuda());
        EXPECT_TRUE(all_close(out.cpu(), expected, tolerance_of(dtype)))
            << dtype << ' ' << name_of(implementation) << ' ' << problem.describe();
      }
    }
  }
}

TEST_F(Cuda, AttentionGradientsEqualTheNaiveTwins) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    for (auto& problem : random_problems(dtype, /*count=*/4)) {
      const auto upstream = torch::randn_like(problem.q);
      const auto expected =
          naive_attention_backward(upstream, problem.q, problem.k, problem.v, problem.options);
      for (const auto implementation : kImplementations) {
        problem.options.implementation(implementation);
        const auto there = cuda(problem);
        const auto leaf = [](const torch::Tensor& x) { return x.detach().requires_grad_(); };
        const auto q = leaf(there.q), k = leaf(there.k), v = leaf(there.v);
        attention(q, k, v, there.options).backward(cuda(upstream));
        const auto tolerance =
            dtype == torch::kFloat32 ? Tolerance{1e-5, 2e-4} : Tolerance{1e-7, 1e-7};
        EXPECT_TRUE(all_close(q.grad().cpu(), expected.q.to(dtype), tolerance));
        EXPECT_TRUE(all_close(k.grad().cpu(), expected.k.to(dtype), tolerance));
        EXPECT_TRUE(all_close(v.grad().cpu(), expected.v.to(dtype), tolerance));
      }
    }
  }
}

TEST_F(Cuda, StridesOfInputsAndUpstreamGradientDoNotMatter) {
  const auto strided = cuda(torch::randn({2, 7, 4, 16})).transpose(1, 2);  // [B, H, T, D]
  const auto upstream = cuda(torch::randn({2, 1, 7, 1})).expand({2, 4, 7, 16});
  for (const auto implementation : kImplementations) {
    const auto options = AttentionOptions().implementation(implementation);
    const auto x = strided.detach().requires_grad_();
    const auto dense = strided.contiguous().requires_grad_();
    const auto out = attention(x, x, x, options);
    const auto expected = attention(dense, dense, dense, options);
    EXPECT_TRUE(all_close(out, expected)) << name_of(implementation);
    out.backward(upstream);
    expected.backward(upstream.contiguous());
    EXPECT_TRUE(all_close(x.grad(), dense.grad())) << name_of(implementation);
  }
}

TEST_F(Cuda, QueriesThatSeeNoKeyGiveZerosAndZeroGradients) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16, torch::kFloat16}) {
    for (const auto implementation : kImplementations) {
      SCOPED_TRACE(std::string(name_of(implementation)) + ' ' + c10::toString(dtype));
      auto mask = torch::zeros({2, 5}, torch::kBool);
      mask[0].fill_(true);
      mask[1].narrow(0, 0, 2).fill_(true);
      const auto options =
          AttentionOptions().implementation(implementation).key_padding_mask(cuda(mask));
      const auto x = cuda(torch::randn({2, 2, 5, 8})).to(dtype).requires_grad_();
      const auto out = attention(x, x, x, options);
      EXPECT_TRUE(all_equal(out[0], torch::zeros_like(out[0])));
      EXPECT_TRUE(all_equal(out[1].narrow(1, 0, 2), torch::zeros_like(out[1].narrow(1, 0, 2))));
      EXPECT_TRUE(all_finite(out));
      out.sum().backward();
      EXPECT_TRUE(all_finite(x.grad()));
      EXPECT_TRUE(all_equal(x.grad()[0], torch::zeros_like(x[0])));
    }
  }
}

TEST_F(Cuda, HalfPrecisionScalesBeforeItOverflows) {
  const auto q = torch::full({1, 2, 8, 64}, 60.0, torch::dtype(torch::kHalf).device(torch::kCUDA));
  const auto v = cuda(torch::randn({1, 2, 8, 64})).to(torch::kHalf);
  const auto count = cuda(torch::arange(1, 9)).view({8, 1});
  const auto mean = (v.to(torch::kFloat32).cumsum(2) / count).to(torch::kHalf);
  for (const auto implementation : kImplementations) {
    const auto out = attention(q, q, v, AttentionOptions().implementation(implementation));
    EXPECT_TRUE(all_close(out, mean, {1e-3, 2e-3})) << name_of(implementation);
  }
  const auto weights = std::get<1>(attention_with_weights(q, q, v));
  EXPECT_TRUE(weights.is_cuda());
  EXPECT_TRUE(all_finite(weights));
  EXPECT_TRUE(all_equal(weights.triu(1), torch::zeros_like(weights)));
}

TEST_F(Cuda, TheScaleMayBeZeroOrNegative) {
  const auto x = torch::randn({1, 2, 5, 8});
  for (const double scale : {0.0, -0.3}) {
    const auto expected = naive_attention(x, x, x, AttentionOptions().scale(scale)).out;
    for (const auto implementation : kImplementations) {
      const auto options = AttentionOptions().scale(scale).implementation(implementation);
      EXPECT_TRUE(all_close(attention(cuda(x), cuda(x), cuda(x), options).cpu(),
                            expected.to(torch::kFloat32), tolerance_of(torch::kFloat32)))
          << name_of(implementation) << ", scale " << scale;
    }
  }
}

TEST_F(Cuda, MoreRowsThanALaunchGridHoldsWork) {
  const auto x = torch::randn({70000, 1, 4, 8});
  const auto expected = naive_attention(x, x, x).out.to(torch::kFloat32);
  for (const auto implementation : {Implementation::automatic, Implementation::math}) {
    const auto leaf = cuda(x).requires_grad_();
    const auto out = attention(leaf, leaf, leaf, AttentionOptions().implementation(implementation));
    EXPECT_TRUE(all_close(out.cpu(), expected, tolerance_of(torch::kFloat32)))
        << name_of(implementation);
    out.sum().backward();
    EXPECT_TRUE(all_finite(leaf.grad()));
  }
}

TEST_F(Cuda, LongSequencesEqualARowWiseReference) {
  constexpr int64_t T = 4096;
  const auto x = torch::randn({1, 2, T, 64});
  auto mask = torch::zeros({1, T}, torch::kBool);
  mask[0].narrow(0, 100, 50).fill_(true);
  for (const auto implementation : kImplementations) {
    for (const bool padded : {true, false}) {
      auto options = AttentionOptions().implementation(implementation);
      if (padded) options.key_padding_mask(cuda(mask));
      const auto leaf = cuda(x).requires_grad_();
      const auto out = attention(leaf, leaf, leaf, options);
      for (const int64_t t : {0, 1, 120, 2047, 4095}) {
        const auto seen = x.narrow(2, 0, t + 1);
        auto row_options = AttentionOptions();
        if (padded) row_options.key_padding_mask(mask.narrow(1, 0, t + 1));
        const auto row = naive_attention(x.narrow(2, t, 1), seen, seen, row_options).out;
        EXPECT_TRUE(all_close(out.narrow(2, t, 1).cpu(), row.to(torch::kFloat32),
                              tolerance_of(torch::kFloat32)))
            << name_of(implementation) << ", t " << t;
      }
      out.sum().backward();
      EXPECT_TRUE(all_finite(leaf.grad()));
    }
  }
}

TEST_F(Cuda, AMaskOnAnotherDeviceIsRefusedByName) {
  const auto x = cuda(torch::randn({1, 2, 4, 8}));
  const auto options = AttentionOptions().key_padding_mask(torch::zeros({1, 4}, torch::kBool));
  const auto message = value_error([&] { attention(x, x, x, options); });
  EXPECT_TRUE(mentions(message, {"key_padding_mask must be on", "cuda:0", "got cpu"}));
}

TEST_F(Cuda, IdsOutOfRangeAreRefusedBeforeAKernelSeesThem) {
  for (const auto& subject : modules_where([](const auto& m) { return m.input == Input::ids; })) {
    SCOPED_TRACE(subject.name);
    auto module = subject.make({});
    module.ptr()->to(torch::kCUDA);
    const auto message = value_error([&] {
      subject.run(module, cuda(torch::tensor({{ModuleCase::kVocab, int64_t{1}}})));
    });
    EXPECT_TRUE(mentions(message, {"ids", "(20)", "got 20"}));
    EXPECT_TRUE(mentions(value_error([&] {
                           subject.run(module, cuda(torch::tensor({{1, -1}})));
                         }),
                         {"ids", "got -1"}));
    // After a device assert, nothing would work any more.
    EXPECT_TRUE(all_finite(subject.run(module, cuda(torch::tensor({{1, 2}})))));
    torch::cuda::synchronize();
  }
}

/// Built on the CPU, then moved.
class CudaModule : public Cuda, public ::testing::WithParamInterface<ModuleCase> {
 protected:
  static constexpr int64_t B = 2, T = 6;

  const ModuleCase& subject() const { return GetParam(); }
  torch::Tensor run(torch::nn::AnyModule& module, const torch::Tensor& x) const {
    return subject().run(module, x);
  }
};
INSTANTIATE_TEST_SUITE_P(Each, CudaModule, ::testing::ValuesIn(all_modules()), module_name);

class CudaModuleOnTensors : public CudaModule {};
INSTANTIATE_TEST_SUITE_P(Each, CudaModuleOnTensors,
                         ::testing::ValuesIn(modules_where([](const auto& m) {
                           return m.input != Input::length;
                         })),
                         module_name);

TEST_P(CudaModule, GivesTheCpusResultAndGradientsAfterMoving) {
  for (const auto implementation : kImplementations) {
    SCOPED_TRACE(name_of(implementation));
    auto module = subject().make({.implementation = implementation});
    const auto x = subject().random_input(B, T);
    const auto y = run(module, x);
    auto moved = module.clone(torch::Device(torch::kCUDA));
    const auto z = run(moved, cuda(x));
    EXPECT_TRUE(z.is_cuda());
    EXPECT_TRUE(all_close(z.cpu(), y, tolerance_of(torch::kFloat32)));
    if (module.ptr()->parameters().empty()) continue;
    const auto upstream = torch::randn_like(y);
    y.backward(upstream);
    z.backward(cuda(upstream));
    const auto parameters = moved.ptr()->named_parameters();
    for (const auto& parameter : module.ptr()->named_parameters()) {
      EXPECT_TRUE(all_close(parameters[parameter.key()].grad().cpu(), parameter.value().grad(),
                            {1e-4, 1e-5}))
          << parameter.key();
    }
  }
}

TEST_P(CudaModule, TravelsBetweenDevicesAndDtypes) {
  auto module = subject().make({});
  const auto x = subject().random_input(B, T);
  const auto y = run(module, x);
  const auto& root = module.ptr();
  root->to(torch::kCUDA);
  EXPECT_TRUE(all_close(run(module, cuda(x)).cpu(), y, tolerance_of(torch::kFloat32)));
  root->to(torch::kFloat64);
  const auto wide = run(module, x.is_floating_point() ? cuda(x).to(torch::kFloat64) : cuda(x));
  EXPECT_TRUE(wide.is_cuda());
  EXPECT_EQ(wide.scalar_type(), torch::kFloat64);
  root->to(torch::kCPU, torch::kFloat32);
  EXPECT_TRUE(torch::equal(run(module, x), y));
}

TEST_P(CudaModuleOnTensors, TheFutureDoesNotChangeThePast) {
  for (const auto implementation : kImplementations) {
    for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kFloat16}) {
      auto module = subject().make({.implementation = implementation});
      module.ptr()->to(torch::kCUDA, dtype);
      const auto x = cuda(subject().random_input(B, T, dtype));
      const auto y = run(module, x);
      EXPECT_EQ(y.scalar_type(), dtype);
      for (int64_t t = 0; t < T; ++t) {
        const auto changed = run(module, subject().with_other_token(x, t));
        EXPECT_TRUE(torch::equal(changed.narrow(1, 0, t), y.narrow(1, 0, t)))
            << name_of(implementation) << ' ' << dtype << ", t " << t;
        EXPECT_FALSE(torch::equal(changed.select(1, t), y.select(1, t))) << dtype << ", t " << t;
      }
    }
  }
}

TEST_P(CudaModule, LoadsTheStateOfAModuleOnTheOtherDevice) {
  auto source = subject().make({});
  auto target = subject().make({});
  target.ptr()->to(torch::kCUDA);
  load_state_dict(*target.ptr(), state_dict(*source.ptr()));
  const auto x = subject().random_input(B, T);
  EXPECT_TRUE(all_close(run(target, cuda(x)).cpu(), run(source, x), tolerance_of(torch::kFloat32)));
  for (const auto& parameter : target.ptr()->parameters()) EXPECT_TRUE(parameter.is_cuda());

  auto back = subject().make({});
  load_state_dict(*back.ptr(), state_dict(*target.ptr()));
  EXPECT_TRUE(torch::equal(run(back, x), run(source, x)));
}

}  // namespace
}  // namespace attn::testing
