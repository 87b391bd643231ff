// The kernel of a whole self-attention module on raw memory, for every instruction set of this
// machine, against loops in double.

#include "kernels/attention.h"
#include "kernels/instruction_set.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

namespace attn::kernels {
namespace {

Parallel threads(int count) {
  return {count, [](int n, void (*work)(void*, int), void* data) {
            std::vector<std::thread> pool;
            for (int i = 1; i < n; ++i) pool.emplace_back(work, data, i);
            work(data, 0);
            for (auto& thread : pool) thread.join();
          }};
}

const Allocator kAllocator = {
    [](uint64_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); },
    [](void* pointer) { std::free(pointer); }};

struct Shape {
  int64_t B, T, H, D;
  bool bias = true, causal = true, padded = false;
};

struct Module {
  explicit Module(const Shape& shape_) : shape(shape_), C(shape.H * shape.D) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto filled = [&](int64_t count, float deviation) {
      std::vector<float> values(static_cast<size_t>(count));
      for (auto& value : values) value = normal(random) * deviation;
      return values;
    };
    const float deviation = 1.0F / std::sqrt(static_cast<float>(C));
    x = filled(shape.B * shape.T * C, 1.0F);
    qkv = filled(3 * C * C, deviation), qkv_bias = filled(3 * C, 1.0F);
    proj = filled(C * C, deviation), proj_bias = filled(C, 1.0F);
    for (int64_t i = 0; i < shape.B * shape.T; ++i) padding.push_back(random() % 3 == 0);
    // Room behind the result, to see that nothing is written there.
    out.assign(x.size() + kRoom, 99.0F);
  }

  void forward(int thread_count) {
    ModuleArguments a;
    a.problem.B = shape.B, a.problem.H = a.problem.Hkv = shape.H;
    a.problem.T = a.problem.S = shape.T, a.problem.D = shape.D;
    a.problem.scale = 1.0F / std::sqrt(static_cast<float>(shape.D));
    a.problem.causal = shape.causal;
    if (shape.padded) {
      a.problem.key_padding = reinterpret_cast<const bool*>(padding.data());
      a.problem.key_padding_row = shape.T;
    }
    a.x = x.data(), a.out = out.data();
    a.qkv = {qkv.data(), C, shape.bias ? qkv_bias.data() : nullptr};
    a.proj = {proj.data(), C, shape.bias ? proj_bias.data() : nullptr};
    module_forward(a, threads(thread_count), kAllocator);
  }

  std::vector<double> linear(const std::vector<double>& rows, const std::vector<float>& weight,
                             const std::vector<float>& bias, int64_t outputs) const {
    std::vector<double> y;
    for (int64_t r = 0; r < shape.B * shape.T; ++r) {
      for (int64_t n = 0; n < outputs; ++n) {
        double sum = shape.bias ? bias[n] : 0.0;
        for (int64_t c = 0; c < C; ++c) sum += rows[r * C + c] * weight[n * C + c];
        y.push_back(sum);
      }
    }
    return y;
  }

  std::vector<double> naive() const {
    const auto projected = linear({x.begin(), x.end()}, qkv, qkv_bias, 3 * C);
    std::vector<double> mixed(x.size(), 0.0);
    for (int64_t b = 0; b < shape.B; ++b) {
      for (int64_t h = 0; h < shape.H; ++h) {
        for (int64_t t = 0; t < shape.T; ++t) {
          const auto at = [&](int64_t row, int64_t third) {
            return projected.data() + (b * shape.T + row) * 3 * C + third * C + h * shape.D;
          };
          std::vector<double> weight(shape.T, 0.0);
          double total = 0.0;
          for (int64_t s = 0; s < (shape.causal ? t + 1 : shape.T); ++s) {
            if (shape.padded && padding[b * shape.T + s]) continue;
            double score = 0.0;
            for (int64_t d = 0; d < shape.D; ++d) score += at(t, 0)[d] * at(s, 1)[d];
            total += weight[s] = std::exp(score / std::sqrt(static_cast<double>(shape.D)));
          }
          for (int64_t s = 0; s < shape.T && total > 0.0; ++s) {
            for (int64_t d = 0; d < shape.D; ++d)
              mixed[(b * shape.T + t) * C + h * shape.D + d] += weight[s] / total * at(s, 2)[d];
          }
        }
      }
    }
    return linear(mixed, proj, proj_bias, C);
  }

  static constexpr size_t kRoom = 32;
  Shape shape;
  int64_t C;
  std::vector<float> x, qkv, qkv_bias, proj, proj_bias, out;
  std::vector<char> padding;
};

void expect_naive(const Shape& shape) {
  SCOPED_TRACE(::testing::Message() << "B" << shape.B << " T" << shape.T << " H" << shape.H << " D"
                                    << shape.D << " causal " << shape.causal << " padded "
                                    << shape.padded << " bias " << shape.bias);
  Module module(shape);
  module.forward(1);
  const auto naive = module.naive();
  // Sums of C products of O(1) numbers, three times in a row: some 3 sqrt(C) roundings of 6e-8.
  const double tolerance = 6e-7 * (8.0 + std::sqrt(static_cast<double>(module.C)));
  for (size_t i = 0; i < naive.size(); ++i)
    ASSERT_NEAR(module.out[i], naive[i], tolerance * std::max(1.0, std::abs(naive[i]))) << i;
  for (size_t i = naive.size(); i < module.out.size(); ++i) ASSERT_EQ(module.out[i], 99.0F) << i;

  for (const int count : {2, 3}) {
    Module other(shape);
    other.forward(count);
    ASSERT_EQ(other.out, module.out) << count << " threads";
  }
}

TEST(ModuleKernel, EqualsTheNaiveTwinWithTheSameBitsForAnyNumberOfThreads) {
  for (const auto& name : instruction_sets()) {
    SCOPED_TRACE(name);
    limit_instruction_set(name);
    for (const int64_t T : {1, 4, 5, 12, 16, 17, 49, 64}) {
      expect_naive({1, T, 2, 4});
      expect_naive({5, T, 4, 4, /*bias=*/false});
      expect_naive({3, T, 1, 7, true, /*causal=*/false});
      expect_naive({7, T, 4, 8, true, true, /*padded=*/true});
      expect_naive({2, T, 3, 17, true, false, /*padded=*/true});
      expect_naive({4, T, 2, 32});
    }
    expect_naive({20, 3, 8, 16});
    expect_naive({1, 2, 1, 1});
  }
  limit_instruction_set(instruction_sets().front());
}

}  // namespace
}  // namespace attn::kernels
