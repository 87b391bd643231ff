// The linear layer for few rows on raw memory, for every instruction set of this machine, against
// loops in double.

#include "kernels/row_linear.h"

#include "kernels/instruction_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace attn::kernels {
namespace {

float wide(float value) {
  return value;
}
float wide(BFloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
void narrow(float value, float& to) {
  to = value;
}
void narrow(float value, BFloat16& to) {  // towards zero: the test's own weights may be anything
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  to.bits = static_cast<uint16_t>(bits >> 16);
}

template <typename T>
void expect_naive(int64_t rows, int64_t K, int64_t N, bool with_bias) {
  SCOPED_TRACE(::testing::Message() << rows << ", " << K << ", " << N << ", " << with_bias);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(rows * K)), bias(static_cast<size_t>(N));
  std::vector<T> weight(static_cast<size_t>(N * K));
  for (auto& value : x) value = normal(random);
  for (auto& value : bias) value = normal(random);
  for (auto& value : weight) narrow(normal(random), value);

  constexpr float kUntouched = 1234.0F;
  const auto outputs = static_cast<size_t>(rows * N);
  std::vector<float> y(outputs + 16, kUntouched), split = y;
  RowLinearArguments<T> a;
  a.rows = rows, a.K = K, a.N = N;
  a.x = x.data(), a.weight = weight.data(), a.bias = with_bias ? bias.data() : nullptr;
  a.y = y.data();
  row_linear(a, 0, N);
  a.y = split.data();
  for (int64_t n = 0; n < N; n += 3) row_linear(a, n, std::min(N, n + 3));
  EXPECT_EQ(0, std::memcmp(y.data(), split.data(), y.size() * sizeof(float)));
  for (size_t i = outputs; i < y.size(); ++i) EXPECT_EQ(y[i], kUntouched);

  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < N; ++n) {
      double sum = with_bias ? bias[static_cast<size_t>(n)] : 0.0, size = std::abs(sum);
      for (int64_t k = 0; k < K; ++k) {
        const double term = double{x[static_cast<size_t>(r * K + k)]} *
                            wide(weight[static_cast<size_t>(n * K + k)]);
        sum += term;
        size += std::abs(term);
      }
      ASSERT_NEAR(y[static_cast<size_t>(r * N + n)], sum, 1e-6 * size + 1e-30) << r << ", " << n;
    }
  }
}

TEST(RowLinear, EqualsTheNaiveTwinWithTheSameBitsForAnySplit) {
  for (const auto& name : instruction_sets()) {
    SCOPED_TRACE(name);
    limit_instruction_set(name);
    for (int64_t rows = 1; rows <= kMostLinearRows; ++rows) {
      for (const int64_t K : {1, 3, 15, 16, 17, 64, 100}) {
        for (const int64_t N : {1, 2, 4, 5, 11}) {
          expect_naive<float>(rows, K, N, N % 2 == 0);
          expect_naive<BFloat16>(rows, K, N, N % 2 == 1);
        }
      }
    }
  }
  limit_instruction_set(instruction_sets().front());
}

}  // namespace
}  // namespace attn::kernels
