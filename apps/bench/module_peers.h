#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace bench {

/// Weights of a self-attention module, whatever its class.
struct Projections {
  at::Tensor qkv_weight, out_weight;  // [3C, C], [C, C]
  std::optional<at::Tensor> qkv_bias, out_bias;
  int64_t H;
};

/// The seeds' forward, operation by operation: x [B, T, C] -> [B, T, C].
/// @param future [T, T] bool, true above the diagonal: made beforehand, which the seed does not.
at::Tensor op_chain(const Projections& projections, const at::Tensor& x, const at::Tensor& future);

/// linear, scaled_dot_product_attention on views, linear: x [B, T, C] -> [B, T, C].
at::Tensor linear_sdpa_linear(const Projections& projections, const at::Tensor& x);

}  // namespace bench
