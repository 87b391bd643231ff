#pragma once

#include <attn/export.h>
#include <attn/functional.h>
#include <attn/modules/cloneable.h>

#include <torch/nn/pimpl.h>

namespace attn {

/// Options of `LayerNorm`.
struct ATTN_API LayerNormOptions {
  explicit LayerNormOptions(int64_t d_model) : d_model_(d_model) {}

  TORCH_ARG(int64_t, d_model);  ///< model width C
  TORCH_ARG(double, eps) = 1e-5;
};

/// scale · (x - mean) / sqrt(var + eps) + shift over the last dimension, with the biased variance
/// (seed 2's transformer block; Ba et al. 2016).
class ATTN_API LayerNormImpl : public Cloneable<LayerNormImpl> {
 public:
  explicit LayerNormImpl(int64_t d_model, double eps = 1e-5)
      : LayerNormImpl(LayerNormOptions(d_model).eps(eps)) {}
  /// @throws c10::ValueError if d_model is below 1, or eps negative or not finite.
  explicit LayerNormImpl(const LayerNormOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// [..., C] -> [..., C].
  /// @throws c10::ValueError if the last dimension is not C.
  Tensor forward(const Tensor& x);

  LayerNormOptions options;
  Tensor scale;  ///< [C], ones at first
  Tensor shift;  ///< [C], zeros at first
};
TORCH_MODULE(LayerNorm);

}  // namespace attn
