#include "module_peers.h"

#include "attention_problem.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>

#include <cmath>

namespace bench {

at::Tensor op_chain(const Projections& projections, const at::Tensor& x, const at::Tensor& future) {
  const auto B = x.size(0), T = x.size(1), C = x.size(2), H = projections.H;
  const auto parts =
      at::linear(x, projections.qkv_weight, projections.qkv_bias).split(C, 2);  // 3 x [B, T, C]
  const auto q = parts[0].view({B, T, H, C / H}).transpose(1, 2);               // [B, H, T, D]
  const auto k = parts[1].view({B, T, H, C / H}).transpose(1, 2);               // [B, H, T, D]
  const auto v = parts[2].view({B, T, H, C / H}).transpose(1, 2);               // [B, H, T, D]
  const double scale = 1.0 / std::sqrt(static_cast<double>(C / H));
  const auto scores = at::matmul(q, k.transpose(-2, -1)) * scale;               // [B, H, T, T]
  const auto weights = at::softmax(scores.masked_fill(future, -INFINITY), -1);  // [B, H, T, T]
  const auto y = at::matmul(weights, v).transpose(1, 2).contiguous().view({B, T, C});
  return at::linear(y, projections.out_weight, projections.out_bias);  // [B, T, C]
}

at::Tensor linear_sdpa_linear(const Projections& projections, const at::Tensor& x) {
  const auto B = x.size(0), T = x.size(1), C = x.size(2), H = projections.H;
  const auto qkv = at::linear(x, projections.qkv_weight, projections.qkv_bias);  // [B, T, 3C]
  const auto [q, k, v] = heads_of(qkv, {B, T, H, C / H});                        // [B, H, T, D]
  const auto y = at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                                  /*is_causal=*/true);
  return at::linear(y.transpose(1, 2).reshape({B, T, C}), projections.out_weight,
                    projections.out_bias);  // [B, T, C]
}

}  // namespace bench
