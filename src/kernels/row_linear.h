#pragma once

#include "kernels/attention.h"

#include <cstdint>

namespace attn::kernels {

constexpr int64_t kMostLinearRows = 4;

/// y = x · weightᵀ + bias for few rows of x, as a decoding step has them: the time is that of
/// reading the weight once. T is float or BFloat16; sums are float32 and y is float32.
template <typename T>
struct RowLinearArguments {
  int64_t rows = 0;  ///< of x and y, at most kMostLinearRows
  int64_t K = 0, N = 0;
  const float* x = nullptr;     ///< [rows, K]
  const T* weight = nullptr;    ///< [N, K], contiguous
  const float* bias = nullptr;  ///< [N], or none
  float* y = nullptr;           ///< [rows, N]
};

/// Outputs `first` to `last` - 1 of every row. Any split gives the same bits.
template <typename T>
void row_linear(const RowLinearArguments<T>& arguments, int64_t first, int64_t last);

}  // namespace attn::kernels
