#pragma once

#include <attn/export.h>
#include <attn/modules/cloneable.h>
#include <attn/modules/multi_head_attention.h>

#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

namespace attn {

/// The position-wise half of a block: fc2(GELU(fc1(x))), then dropout (seed 2's transformer block).
class ATTN_API FeedForwardImpl : public Cloneable<FeedForwardImpl> {
 public:
  /// Reads d_model, mlp_expansion, residual_dropout, use_bias and activation.
  /// @throws c10::ValueError if a size is below 1 or the dropout outside [0, 1].
  explicit FeedForwardImpl(const BlockOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// [..., C] -> [..., C].
  /// @throws c10::ValueError if the last dimension is not C.
  Tensor forward(const Tensor& x);

  BlockOptions options;
  torch::nn::Linear fc1{nullptr};  ///< [C] -> [mlp_expansion · C]
  torch::nn::Linear fc2{nullptr};  ///< back to [C]
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(FeedForward);

}  // namespace attn
