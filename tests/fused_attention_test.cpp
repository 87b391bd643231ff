// The fused CPU operation as users call it, against the math. The kernels alone are tested in
// kernels/.

#include "attn/functional.h"
#include "attn/modules/multi_head_self_attention.h"
#include "support/all_close.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/CPUAllocator.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <dirent.h>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>

namespace attn::testing {
namespace {

using functional::attention;
using functional::AttentionOptions;
using functional::packed_self_attention;

class FusedAttention : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(3);
    threads_ = at::get_num_threads();
  }
  void TearDown() override { at::set_num_threads(threads_); }

  static AttentionOptions fused() {
    return AttentionOptions().implementation(Implementation::fused);
  }

 private:
  int threads_ = 1;
};

// A tensor of that shape with other strides than usual: heads innermost, or a slice of wider rows.
torch::Tensor strided(const torch::Tensor& x, int64_t kind) {
  if (kind == 1) return x.transpose(1, 2).contiguous().transpose(1, 2);
  if (kind == 2) return torch::cat({x, x}, -1).narrow(-1, 0, x.size(-1));
  return x;
}

TEST_F(FusedAttention, EqualsTheMathForRandomShapesAndOptions) {
  std::mt19937 random(2026);
  const auto upto = [&](int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random() % static_cast<uint64_t>(most - least + 1));
  };
  for (int i = 0; i < 2000; ++i) {
    const int64_t Hkv = upto(1, 3), H = Hkv * upto(1, 2), B = upto(0, 2), D = upto(1, 40);
    const int64_t T = upto(0, 70), S = i % 3 == 0 ? T : upto(0, 70);
    const bool backward = i % 2 == 0;
    const auto input = [&](int64_t heads, int64_t rows) {
      return strided(torch::randn({B, heads, rows, D}), upto(0, 2)).detach();
    };
    const auto q = input(H, T), k = input(Hkv, S), v = input(Hkv, S);
    auto options = AttentionOptions().causal(i % 5 != 0);
    if (i % 4 == 1) options.key_padding_mask(torch::rand({B, S}) < 0.3);
    if (i % 7 == 1) options.scale(0.7);

    const auto run = [&](Implementation implementation, torch::Dtype dtype) {
      const auto leaf = [&](const torch::Tensor& x) {
        return x.to(dtype).detach().requires_grad_(backward);
      };
      const std::vector<torch::Tensor> inputs = {leaf(q), leaf(k), leaf(v)};
      std::vector<torch::Tensor> results = {
          attention(inputs[0], inputs[1], inputs[2], options.implementation(implementation))};
      if (backward) {
        results[0].backward(torch::ones_like(results[0]).cumsum(1) * 0.5);
        for (const auto& x : inputs) results.push_back(x.grad());
      }
      return results;
    };
    const auto actual = run(Implementation::fused, torch::kFloat32);
    const auto expected = run(Implementation::math, torch::kFloat64);
    for (size_t part = 0; part < actual.size(); ++part) {
      // Sums of up to 70 (forward) and 70 · 40 (backward) rounded products of size 1 to 10.
      const auto tolerance = part == 0 ? Tolerance{1e-5, 1e-5} : Tolerance{1e-5, 1e-4};
      ASSERT_TRUE(all_close(actual[part].to(torch::kFloat64), expected[part].detach(), tolerance))
          << "case " << i << ", result " << part << ": B" << B << " H" << H << "/" << Hkv << " T"
          << T << " S" << S << " D" << D;
    }
  }
}

TEST_F(FusedAttention, InBFloat16IsTheFloatResultRounded) {
  for (const int64_t T : {1, 17, 64, 130}) {
    const auto qkv = torch::randn({2, T, 3 * 4 * 24}).to(torch::kBFloat16).requires_grad_();
    const auto wide = qkv.detach().to(torch::kFloat32).requires_grad_();
    const auto y = packed_self_attention(qkv, 4, fused());
    const auto expected =
        packed_self_attention(wide, 4, AttentionOptions().implementation(Implementation::math));
    // Computed in float32 inside: one rounding to 8 bits at the end. On AMX the weights are rounded
    // to 8 bits as well, each by 2^-9 of itself, so that their sum over the values is off by 2^-9
    // of the greatest value at most.
    const double weights = std::ldexp(wide.abs().max().item<double>(), -9);
    EXPECT_TRUE(all_close(y.to(torch::kFloat32), expected, {8e-3, weights}));
    const auto upstream = torch::randn_like(expected).to(torch::kBFloat16);
    y.backward(upstream);
    expected.backward(upstream.to(torch::kFloat32));
    // The saved output was rounded too, which delta sees: a few units of 2^-8.
    EXPECT_TRUE(all_close(qkv.grad().to(torch::kFloat32), wide.grad(), {1.6e-2, 3e-2}));
  }
}

TEST_F(FusedAttention, SameBitsForAnyNumberOfThreads) {
  for (const auto& shape : {std::vector<int64_t>{3, 90, 3 * 5 * 24}, {1, 700, 3 * 16}}) {
    const auto qkv = torch::randn(shape);
    const int64_t heads = shape[0] == 3 ? 5 : 1;
    for (const double p : {0.0, 0.3}) {
      const auto run = [&](int threads) {
        at::set_num_threads(threads);
        torch::manual_seed(5);
        return packed_self_attention(qkv, heads, fused().dropout_p(p));
      };
      const auto one = run(1);
      EXPECT_TRUE(torch::equal(run(2), one));
      EXPECT_TRUE(torch::equal(run(3), one));
    }
  }
}

TEST_F(FusedAttention, DropoutDrawsOnceFromTheGeneratorThatIsGiven) {
  const auto qkv = torch::randn({2, 40, 3 * 16});
  auto generator = at::detail::createCPUGenerator(9);
  const auto options = fused().dropout_p(0.5).generator(generator);
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  const auto first = packed_self_attention(qkv, 2, options);
  const auto second = packed_self_attention(qkv, 2, options);
  EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), before));
  EXPECT_FALSE(torch::equal(first, second));
  generator.set_current_seed(9);
  EXPECT_TRUE(torch::equal(packed_self_attention(qkv, 2, options), first));
  torch::manual_seed(9);
  EXPECT_TRUE(torch::equal(packed_self_attention(qkv, 2, fused().dropout_p(0.5)), first));
}

TEST_F(FusedAttention, DropoutKeepsTheMeanAndHasItsVariance) {
  // Equal scores over 64 keys and values of 1: a row is the kept share / (1 - p).
  const double p = 0.3;
  auto qkv = torch::zeros({64, 64, 3 * 8});
  qkv.narrow(2, 16, 8).fill_(1.0);
  const auto rows =
      packed_self_attention(qkv, 1, fused().causal(false).dropout_p(p)).select(2, 0).flatten();
  // 4096 rows of 64 draws: mean 1, variance p / (1 - p) / 64; five standard errors.
  const double variance = p / (1.0 - p) / 64.0;
  EXPECT_NEAR(rows.mean().item<double>(), 1.0, 5 * std::sqrt(variance / 4096));
  EXPECT_NEAR(rows.var().item<double>(), variance, 5 * variance * std::sqrt(2.0 / 4096));
}

TEST_F(FusedAttention, WhatAQueryMayNotSeeDoesNotReachItEvenAsNaN) {
  const auto qkv = torch::randn({1, 60, 3 * 32});
  const auto clean = packed_self_attention(qkv, 2, fused());
  auto dirty = qkv.clone();
  dirty[0][41].fill_(std::numeric_limits<double>::quiet_NaN());
  const auto y = packed_self_attention(dirty, 2, fused());
  EXPECT_TRUE(torch::equal(y.narrow(1, 0, 41), clean.narrow(1, 0, 41)));
  EXPECT_TRUE(y.narrow(1, 41, 19).isnan().all().item<bool>());
}

TEST_F(FusedAttention, FollowsAutocast) {
  attn::MultiHeadSelfAttention module(32, 4, 12);
  const auto x = torch::randn({2, 12, 32});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const auto y = module(x);
  const auto direct = packed_self_attention(torch::randn({2, 12, 96}), 4, fused());
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_EQ(direct.scalar_type(), at::kBFloat16);
}

TEST_F(FusedAttention, SaysWhatItCannotDo) {
  EXPECT_EQ(functional::fused_obstacle(torch::ones({1, 2, 6})), "");
  EXPECT_EQ(functional::fused_obstacle(torch::ones({1, 2, 6}, torch::kBFloat16)), "");
  EXPECT_NE(functional::fused_obstacle(torch::ones({1, 2, 6}, torch::kFloat64)), "");
  EXPECT_NE(functional::fused_obstacle(torch::ones({1, 2, 6}, torch::kFloat16)), "");
}

// Counts what LibTorch's CPU allocator hands out while it is installed.
class CountingAllocator : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* base) { source = base; }

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = static_cast<char*>(source->raw_allocate(bytes + kHeader));
    *reinterpret_cast<size_t*>(block) = bytes;
    const size_t now = held += bytes;
    size_t seen = peak;
    while (now > seen && !peak.compare_exchange_weak(seen, now)) {
    }
    return {block + kHeader, block + kHeader, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  static inline std::atomic<size_t> held{0}, peak{0};

 private:
  static constexpr size_t kHeader = 64;  // keeps LibTorch's alignment
  static void release(void* pointer) {
    if (pointer == nullptr) return;
    auto* block = static_cast<char*>(pointer) - kHeader;
    held -= *reinterpret_cast<size_t*>(block);
    source->raw_deallocate(block);
  }
  static inline c10::Allocator* source = nullptr;
};

TEST_F(FusedAttention, NeedsNoScoreMatrix) {
  constexpr int64_t kT = 8192;  // [T, T] float32 would be 256 MiB
  constexpr size_t kMiB = size_t{1} << 20;
  const auto qkv = torch::randn({1, kT, 3 * 64});
  at::set_num_threads(2);
  static CountingAllocator counting(c10::GetDefaultCPUAllocator());
  auto* const before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&counting, /*priority=*/100);
  {
    const auto y = packed_self_attention(qkv, 1, fused());  // 2 MiB
    EXPECT_GT(CountingAllocator::peak, 2 * kMiB);
    // Per thread 48 queries, 96 keys and their scores: some 60 KiB.
    EXPECT_LT(CountingAllocator::peak, 3 * kMiB);
  }
  const auto leaf = qkv.clone().requires_grad_();
  packed_self_attention(leaf, 1, fused()).sum().backward();
  // qkv and its gradient 6 MiB each, the output, its gradient; per thread copies of one head's
  // rows.
  EXPECT_LT(CountingAllocator::peak, 80 * kMiB);
  c10::SetCPUAllocator(before, /*priority=*/100);
}

// CPU time, in ticks, of each thread of this process.
std::map<std::string, int64_t> thread_ticks() {
  std::map<std::string, int64_t> ticks;
  DIR* const tasks = opendir("/proc/self/task");
  while (const dirent* task = readdir(tasks)) {
    std::ifstream stat(std::string("/proc/self/task/") + task->d_name + "/stat");
    std::string line;
    if (!std::getline(stat, line)) continue;
    std::istringstream fields(line.substr(line.rfind(')') + 1));
    std::string skipped;
    int64_t user = 0;
    for (int i = 0; i < 11; ++i) fields >> skipped;
    fields >> user;
    ticks[task->d_name] = user;
  }
  closedir(tasks);
  return ticks;
}

TEST_F(FusedAttention, ReallyUsesTwoThreads) {
#ifndef ATTN_HAS_OPENMP
  GTEST_SKIP() << "built without OpenMP";
#endif
  at::set_num_threads(2);
  const auto qkv = torch::randn({1, 1024, 3 * 8 * 64});
  std::map<std::string, int64_t> worked;
  // Until two threads have worked for a tenth of a second each; 1000 calls are far more than
  // enough.
  for (int i = 0; i < 1000; ++i) {
    const auto before = thread_ticks();
    packed_self_attention(qkv, 8, fused());
    int busy = 0;
    for (const auto& [thread, ticks] : thread_ticks()) {
      const auto known = before.find(thread);
      worked[thread] += ticks - (known == before.end() ? 0 : known->second);
      busy += worked[thread] >= 10;
    }
    if (busy >= 2) return;
  }
  FAIL() << "only one thread works";
}

// The dispatcher costs more than a small call's arithmetic; the graph's node tells who recorded it.
TEST_F(FusedAttention, PlainTensorsSkipTheDispatcher) {
  const auto qkv = torch::randn({1, 4, 24}).requires_grad_();
  const auto q = torch::randn({1, 2, 4, 8}).requires_grad_();
  const auto node = [](const Tensor& y) { return y.grad_fn()->name(); };
  EXPECT_NE(node(packed_self_attention(qkv, 2)).find("Direct"), std::string::npos)
      << node(packed_self_attention(qkv, 2));
  EXPECT_NE(node(attention(q, q, q)).find("Direct"), std::string::npos);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto cast = packed_self_attention(qkv, 2);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(cast.scalar_type(), at::kBFloat16);
}

TEST_F(FusedAttention, FrozenInputsGetNoGradientAndTheOthersTheSame) {
  const auto input = [](int64_t heads) { return torch::randn({2, heads, 7, 5}); };
  const std::vector<Tensor> values = {input(4), input(2), input(2)};
  const auto gradients = [&](auto is_frozen) {
    std::vector<Tensor> x;
    for (size_t i = 0; i < 3; ++i) x.push_back(values[i].clone().requires_grad_(!is_frozen(i)));
    attention(x[0], x[1], x[2]).square().sum().backward();
    return std::vector<Tensor>{x[0].grad(), x[1].grad(), x[2].grad()};
  };
  const auto whole = gradients([](size_t) { return false; });
  for (size_t frozen = 0; frozen < 3; ++frozen) {
    const auto some = gradients([&](size_t i) { return i == frozen; });
    const auto one = gradients([&](size_t i) { return i != frozen; });
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(some[i].defined(), i != frozen);
      EXPECT_EQ(one[i].defined(), i == frozen);
      EXPECT_TRUE(torch::equal(i == frozen ? one[i] : some[i], whole[i]));
    }
  }
}

// In inference a small module is one call; with gradients the same module takes three steps.
TEST_F(FusedAttention, SmallModulesInInferenceEqualTheStepsOfTraining) {
  for (const auto& [B, T, C, H] : std::vector<std::array<int64_t, 4>>{
           {1, 4, 8, 2}, {2, 5, 16, 4}, {16, 12, 32, 4}, {8, 64, 128, 8}, {1, 1, 6, 3}}) {
    SCOPED_TRACE(::testing::Message() << B << "," << T << "," << C << "," << H);
    MultiHeadSelfAttention module(C, H, T);
    const auto wide = torch::randn({B, C, 2 * T});
    const auto mask = torch::rand({B, T}).lt(0.3);
    for (const auto& x : {torch::randn({B, T, C}), wide.slice(2, 0, 2 * T, 2).transpose(1, 2)}) {
      for (const auto& padding : {Tensor(), mask, mask.t().contiguous().t()}) {
        const auto expected = module(x, padding);
        EXPECT_TRUE(expected.requires_grad());
        const c10::InferenceMode inference;
        EXPECT_TRUE(all_close(module(x, padding), expected.detach()));
        EXPECT_TRUE(
            all_close(std::get<0>(module->forward_with_weights(x, padding)), expected.detach()));
      }
    }
  }
}

TEST_F(FusedAttention, SmallModulesKeepTheirRulesInInference) {
  MultiHeadSelfAttention module(MultiHeadSelfAttentionOptions(8, 2, 4).attn_dropout(0.5));
  const auto x = torch::randn({2, 4, 8});
  const c10::NoGradGuard no_grad;
  EXPECT_FALSE(torch::equal(module(x), module(x)));  // training: dropout stays on
  module->eval();
  EXPECT_TRUE(torch::equal(module(x), module(x)));
  EXPECT_THROW(module(x, torch::zeros({2, 3}, torch::kBool)), c10::ValueError);
  EXPECT_THROW(module(torch::randn({2, 5, 8})), c10::ValueError);
  EXPECT_EQ(module(torch::empty({0, 4, 8})).sizes(), (std::vector<int64_t>{0, 4, 8}));
  EXPECT_EQ(module(torch::empty({2, 0, 8})).sizes(), (std::vector<int64_t>{2, 0, 8}));
  {
    const auto autocast = at::autocast::is_autocast_enabled(at::kCPU);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    EXPECT_EQ(module(x).scalar_type(), at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, autocast);
    at::autocast::clear_cache();
  }
  module->to(torch::kFloat64);
  EXPECT_EQ(module(x.to(torch::kFloat64)).scalar_type(), at::kDouble);
}

}  // namespace
}  // namespace attn::testing
