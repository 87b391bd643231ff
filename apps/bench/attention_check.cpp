#include "attention_check.h"

#include <attn/functional.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <fmt/format.h>

#include <cmath>
#include <stdexcept>

namespace bench {
namespace {

// Shares of the greatest value. float32: both sides sum at most 2048 terms, in other orders, and
// are off by 1e-6; a wrong element is off by 1e-2. bfloat16 keeps 8 bits, 4e-3, of weights and
// results, and a gradient goes through three such roundings.
constexpr double kFloatTolerance = 2e-5;
constexpr double kBFloat16Tolerance = 1.6e-2;
constexpr double kBFloat16GradientTolerance = 4e-2;

// The same arguments in float32.
AttentionInput in_float(const AttentionProblem& problem) {
  const auto& shape = problem.shape;
  AttentionInput input;
  input.qkv = problem.inputs[0].qkv.detach().to(at::kFloat).clone();
  input.qkv.requires_grad_(problem.mode.backward);
  input.heads = heads_of(input.qkv, shape);
  input.grad = problem.inputs[0].grad.to(at::kFloat);
  input.grad_heads = input.grad.view({shape.B, shape.T, shape.H, shape.D}).transpose(1, 2);
  return input;
}

at::Tensor packed(const AttentionSide& side, const at::Tensor& out) {
  return side.by_heads ? out.transpose(1, 2).flatten(2) : out;  // [B, T, C]
}

AttentionSide reference(const AttentionProblem& problem) {
  const auto forward = [&problem](const AttentionInput& input) {
    const auto [q, k, v] = heads_of(input.qkv, problem.shape);
    const auto mask = problem.bias.defined() ? std::optional(problem.bias.to(at::kFloat))
                                             : std::optional<at::Tensor>();
    return at::scaled_dot_product_attention(q, k, v, mask, /*dropout_p=*/0.0, problem.mode.causal);
  };
  return {"reference", forward, /*by_heads=*/true};
}

// out · expected has the mean expected · expected over the dropout's draws: out is linear in them.
// Its variance is the sum over weights of p / (1 - p) (w_ij v_j · expected_i)².
void check_dropout(const std::string& what, const AttentionProblem& problem,
                   const AttentionInput& input, const at::Tensor& out, const at::Tensor& expected) {
  const auto& shape = problem.shape;
  const auto options = attn::functional::AttentionOptions().causal(problem.mode.causal);
  const auto weights = std::get<1>(attn::functional::packed_self_attention_with_weights(
      input.qkv, shape.H, options));                                                 // [B, H, T, T]
  const auto by_heads = attn::functional::split_heads(expected, shape.H);            // [B, H, T, D]
  const auto terms = weights * at::matmul(by_heads, input.heads.v.transpose(2, 3));  // [B, H, T, T]
  const double p = problem.mode.dropout_p;
  const double deviation = std::sqrt(p / (1 - p) * terms.square().sum(at::kDouble).item<double>());
  const double mean = (expected * expected).sum(at::kDouble).item<double>();
  const double value = (out * expected).sum(at::kDouble).item<double>();
  // Beyond six deviations lies one draw in 5e8.
  if (!(std::abs(value - mean) <= 6 * deviation + kFloatTolerance * mean)) {
    throw std::runtime_error(
        fmt::format("{}: out · expected must be near {:.4g} ± {:.2g}, got {:.4g}", what, mean,
                    deviation, value));
  }
}

}  // namespace

void check_close(const std::string& what, const at::Tensor& result, const at::Tensor& expected,
                 double tolerance) {
  const auto difference = (result.to(at::kFloat) - expected.to(at::kFloat)).abs().max();
  const double share =
      difference.item<double>() / expected.to(at::kFloat).abs().max().item<double>();
  if (!(share <= tolerance)) {
    throw std::runtime_error(
        fmt::format("{} must be right to {:.1e} of the greatest value, and is off by {:.1e}", what,
                    tolerance, share));
  }
}

at::Tensor gradient(const AttentionSide& side, const AttentionInput& input) {
  return torch::autograd::grad({side.forward(input)}, {input.qkv},
                               {side.by_heads ? input.grad_heads : input.grad})[0];
}

void check_side(const AttentionSide& side, const AttentionProblem& problem) {
  const auto& mode = problem.mode;
  const auto what = fmt::format("{} ({}, {})", side.name, problem.shape.name(), mode.title);
  const auto& input = problem.inputs[0];
  const auto truth = reference(problem);
  const auto truth_input = in_float(problem);
  {
    const c10::NoGradGuard no_grad;
    const auto out = packed(side, side.forward(input));               // [B, T, C]
    const auto expected = packed(truth, truth.forward(truth_input));  // [B, T, C]
    if (mode.dropout_p > 0.0) {
      check_dropout(what, problem, truth_input, out, expected);
      return;  // the gradients differ with the draw; the test suite knows them
    }
    check_close(what, out, expected, mode.bfloat16 ? kBFloat16Tolerance : kFloatTolerance);
  }
  if (mode.backward) {
    check_close(what + ", gradient", gradient(side, input), gradient(truth, truth_input),
                mode.bfloat16 ? kBFloat16GradientTolerance : kFloatTolerance);
  }
}

}  // namespace bench
