#pragma once

#include "attn/functional.h"

namespace attn {

/// at::linear: x [..., K] · weightᵀ [K, N] + bias [N] or undefined -> [..., N]. On the CPU, up to
/// four rows without gradients take a kernel that reads the weight at the speed of memory.
Tensor apply_linear(const Tensor& x, const Tensor& weight, const Tensor& bias);

}  // namespace attn
