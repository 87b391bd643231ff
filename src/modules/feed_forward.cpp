#include "attn/modules/feed_forward.h"

#include "checks.h"
#include "linear.h"
#include "printing.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>

namespace attn {
namespace {

Tensor activate(const Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::gelu_tanh:
      return at::gelu(x, "tanh");
    case Activation::gelu:
      return at::gelu(x, "none");
    case Activation::relu:
      return at::relu(x);
  }
  TORCH_CHECK_VALUE(false, "activation must be gelu_tanh, gelu or relu, got ",
                    static_cast<int>(activation));
}

const char* name_of(Activation activation) {
  switch (activation) {
    case Activation::gelu_tanh:
      return "gelu_tanh";
    case Activation::gelu:
      return "gelu";
    case Activation::relu:
      return "relu";
  }
  return "unknown";
}

}  // namespace

FeedForwardImpl::FeedForwardImpl(const BlockOptions& options_) : options(options_) {
  check_positive("d_model", options.d_model());
  check_positive("mlp_expansion", options.mlp_expansion());
  check_probability("residual_dropout", options.residual_dropout());
  reset();
}

void FeedForwardImpl::reset() {
  const int64_t C = options.d_model();
  const int64_t inner = options.mlp_expansion() * C;
  const bool bias = options.use_bias();
  fc1 = register_module("fc1", torch::nn::Linear(torch::nn::LinearOptions(C, inner).bias(bias)));
  fc2 = register_module("fc2", torch::nn::Linear(torch::nn::LinearOptions(inner, C).bias(bias)));
  dropout = register_module("dropout", torch::nn::Dropout(options.residual_dropout()));
}

void FeedForwardImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::FeedForward(d_model=" << options.d_model()
         << ", mlp_expansion=" << options.mlp_expansion()
         << ", residual_dropout=" << options.residual_dropout()
         << ", use_bias=" << yes_no(options.use_bias())
         << ", activation=" << name_of(options.activation()) << ")";
}

Tensor FeedForwardImpl::forward(const Tensor& x) {
  check_width(x, "d_model", options.d_model());
  const auto hidden = activate(apply_linear(x, fc1->weight, fc1->bias),
                               options.activation());            // [..., mlp_expansion · C]
  return dropout(apply_linear(hidden, fc2->weight, fc2->bias));  // [..., C]
}

}  // namespace attn
