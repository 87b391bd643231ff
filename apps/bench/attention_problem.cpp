#include "attention_problem.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace bench {
namespace {

// Several inputs, so that no side meets its own data warmer than a program would; not so many that
// memory fills with them.
constexpr int64_t kMostInputs = 8;
constexpr int64_t kInputBytes = int64_t{64} << 20;

int64_t inputs_for(const AttentionShape& shape) {
  const int64_t bytes = shape.B * shape.T * shape.C() * 4 * static_cast<int64_t>(sizeof(float));
  return std::clamp<int64_t>(kInputBytes / bytes, 2, kMostInputs);
}

// Sentences of several lengths, from seven eighths of T down to a half.
at::Tensor padding_of(const AttentionShape& shape) {
  const auto end = shape.T - shape.T * (at::arange(shape.B) % 4 + 1) / 8;  // [B]
  return at::arange(shape.T).unsqueeze(0) >= end.floor().unsqueeze(1);     // [B, T]
}

}  // namespace

std::string AttentionShape::name() const {
  return fmt::format("{},{},{},{}", B, T, H, D);
}

Heads heads_of(const at::Tensor& qkv, const AttentionShape& shape) {
  // unbind, not split: the gradient is then one stack of contiguous parts.
  const auto parts = qkv.view({shape.B, shape.T, 3, shape.H, shape.D}).unbind(2);  // [B, T, H, D]
  return {parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2)};
}

AttentionProblem make_problem(const AttentionShape& shape, const AttentionMode& mode) {
  // Inference tensors, as a model's activations are in inference; autograd refuses them.
  const c10::InferenceMode inference(!mode.backward);
  AttentionProblem problem{shape, mode, {}, {}, {}};
  const auto options = at::TensorOptions(mode.bfloat16 ? at::kBFloat16 : at::kFloat);
  for (int64_t i = inputs_for(shape); i > 0; --i) {
    AttentionInput input;
    input.qkv = at::randn({shape.B, shape.T, 3 * shape.C()}, options);
    input.grad = at::randn({shape.B, shape.T, shape.C()}, options);
    input.grad_heads = input.grad.view({shape.B, shape.T, shape.H, shape.D}).transpose(1, 2);
    if (mode.backward) {
      input.qkv.requires_grad_();
    } else {
      input.heads = heads_of(input.qkv, shape);
    }
    problem.inputs.push_back(input);
  }
  if (mode.padded) {
    problem.padding = padding_of(shape);
    problem.bias = at::zeros({shape.B, 1, 1, shape.T}, options)
                       .masked_fill(problem.padding.unsqueeze(1).unsqueeze(2), -INFINITY);
  }
  return problem;
}

double AttentionProblem::pairs() const {
  const auto T = static_cast<double>(shape.T);
  if (mode.causal) return static_cast<double>(shape.B) * T * (T + 1) / 2;
  if (!mode.padded) return static_cast<double>(shape.B) * T * T;
  return T * static_cast<double>((~padding).sum().item<int64_t>());
}

Work AttentionProblem::forward_work() const {
  return {4.0 * static_cast<double>(shape.C()) * pairs(), static_cast<double>(shape.H) * pairs()};
}

Work AttentionProblem::backward_work() const {
  return {10.0 * static_cast<double>(shape.C()) * pairs(), static_cast<double>(shape.H) * pairs()};
}

}  // namespace bench
