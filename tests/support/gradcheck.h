#pragma once

// Derivatives against central differences, as torch.autograd.gradcheck and gradgradcheck.

#include "support/all_close.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace attn::testing {

using Tensors = std::vector<torch::Tensor>;
using TensorFunction = std::function<torch::Tensor(const Tensors&)>;

/// PyTorch's own step and tolerances for float64.
inline constexpr double kGradcheckStep = 1e-6;
inline constexpr Tolerance kGradcheckTolerance = {1e-3, 1e-5};

/// The derivative of function(inputs), float64 each, along a random direction of its output.
inline ::testing::AssertionResult gradcheck(const TensorFunction& function, const Tensors& inputs) {
  Tensors leaves;
  for (const auto& input : inputs) leaves.push_back(input.detach().clone().requires_grad_());
  const auto y = function(leaves);
  const auto direction = torch::randn_like(y.detach());
  const auto gradients = torch::autograd::grad({y}, leaves, {direction});

  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto numeric = torch::zeros(leaves[i].sizes(), torch::kFloat64);
    auto slope = numeric.flatten();
    auto values = leaves[i].detach().flatten();  // shares the leaf's storage
    for (int64_t n = 0; n < values.numel(); ++n) {
      const double x = values[n].item<double>();
      const auto shifted = [&](double by) {
        values[n] = x + by;
        return (function(leaves).detach() * direction).sum().item<double>();
      };
      slope[n] = (shifted(kGradcheckStep) - shifted(-kGradcheckStep)) / (2 * kGradcheckStep);
      values[n] = x;
    }
    if (auto result = all_close(gradients[i], numeric, kGradcheckTolerance); !result) {
      return result << " in the gradient of input " << i;
    }
  }
  return ::testing::AssertionSuccess();
}

/// As gradcheck, of the gradients themselves.
inline ::testing::AssertionResult gradgradcheck(const TensorFunction& function,
                                                const Tensors& inputs) {
  const auto direction = torch::randn_like(function(inputs).detach());
  const TensorFunction gradient = [&](const Tensors& all) {
    const Tensors leaves(all.begin(), all.end() - 1);
    const auto gradients =
        torch::autograd::grad({function(leaves)}, leaves, {all.back()},
                              /*retain_graph=*/std::nullopt, /*create_graph=*/true);
    Tensors flat;
    for (const auto& g : gradients) flat.push_back(g.flatten());
    return torch::cat(flat);
  };
  Tensors all = inputs;
  all.push_back(direction);
  return gradcheck(gradient, all);
}

}  // namespace attn::testing
