#pragma once

#include "attention_problem.h"

#include <functional>
#include <string>

namespace bench {

/// One way to compute attention.
struct AttentionSide {
  std::string name;
  std::function<at::Tensor(const AttentionInput&)> forward;
  bool by_heads = false;  ///< the result is [B, H, T, D]; else [B, T, C]
};

/// Does this side compute attention? Results, and with `backward` the gradient, are compared with
/// scaled_dot_product_attention in float32; with dropout, the results' mean.
/// @throws std::runtime_error if not.
void check_side(const AttentionSide& side, const AttentionProblem& problem);

/// The gradient of `input.qkv` for the problem's `grad`.
at::Tensor gradient(const AttentionSide& side, const AttentionInput& input);

/// @throws std::runtime_error if `result` is off by more than `tolerance` of the greatest value.
void check_close(const std::string& what, const at::Tensor& result, const at::Tensor& expected,
                 double tolerance);

}  // namespace bench
