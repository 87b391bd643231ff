#include "linear.h"

#include "fused_attention.h"
#include "kernels/row_linear.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

namespace attn {
namespace {

constexpr int64_t kLeastWeights = 1 << 16;  // below, a call's own cost decides
constexpr int64_t kGrain = 1 << 18;         // weights that pay for another thread

bool is_dense(const Tensor& x, at::ScalarType dtype) {
  return x.scalar_type() == dtype && x.is_contiguous() && functional::is_plain_cpu(x) &&
         !x.is_neg();
}

bool takes_few_rows(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const auto dtype = weight.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16) return false;
  if (weight.dim() != 2 || x.dim() < 1 || weight.numel() < kLeastWeights) return false;
  const int64_t K = weight.size(1);
  if (x.size(-1) != K || x.numel() == 0 || x.numel() > kernels::kMostLinearRows * K) return false;
  const auto needs_gradient = [](const Tensor& tensor) { return tensor.requires_grad(); };
  if (at::GradMode::is_enabled() &&
      (needs_gradient(x) || needs_gradient(weight) || (bias.defined() && needs_gradient(bias))))
    return false;
  return is_dense(x, dtype) && is_dense(weight, dtype) &&
         (!bias.defined() ||
          (is_dense(bias, dtype) && bias.dim() == 1 && bias.size(0) == weight.size(0)));
}

template <typename T>
Tensor few_rows(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const int64_t K = weight.size(1), N = weight.size(0);
  auto shape = x.sizes().vec();
  shape.back() = N;
  const auto wide_x = x.to(at::kFloat), wide_bias = bias.defined() ? bias.to(at::kFloat) : bias;
  auto y = at::empty(shape, x.options().dtype(at::kFloat));
  kernels::RowLinearArguments<T> a;
  a.rows = x.numel() / K;
  a.K = K;
  a.N = N;
  a.x = wide_x.const_data_ptr<float>();
  a.weight = static_cast<const T*>(weight.const_data_ptr());
  a.bias = bias.defined() ? wide_bias.const_data_ptr<float>() : nullptr;
  a.y = y.mutable_data_ptr<float>();
  at::parallel_for(0, N, std::max<int64_t>(1, kGrain / K),
                   [&](int64_t first, int64_t last) { kernels::row_linear(a, first, last); });
  return y.to(x.scalar_type());
}

}  // namespace

Tensor apply_linear(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  if (!takes_few_rows(x, weight, bias)) return at::linear(x, weight, bias);
  return weight.scalar_type() == at::kFloat ? few_rows<float>(x, weight, bias)
                                            : few_rows<kernels::BFloat16>(x, weight, bias);
}

}  // namespace attn
