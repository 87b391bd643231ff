#include "attn/modules/layer_norm.h"

#include "checks.h"

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>

namespace attn {

LayerNormImpl::LayerNormImpl(const LayerNormOptions& options_) : options(options_) {
  check_positive("d_model", options.d_model());
  TORCH_CHECK_VALUE(std::isfinite(options.eps()) && options.eps() >= 0.0,
                    "eps must be at least 0 and finite, got ", options.eps());
  reset();
}

void LayerNormImpl::reset() {
  scale = register_parameter("scale", at::ones({options.d_model()}));
  shift = register_parameter("shift", at::zeros({options.d_model()}));
}

void LayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::LayerNorm(d_model=" << options.d_model() << ", eps=" << options.eps() << ")";
}

Tensor LayerNormImpl::forward(const Tensor& x) {
  check_width(x, "d_model", options.d_model());
  return at::layer_norm(x, {options.d_model()}, scale, shift, options.eps());  // [..., C]
}

}  // namespace attn
