#include "stories.h"

#include <attn/modules/transformer_block.h>
#include <attn/summary.h>

#include <ATen/Context.h>
#include <ATen/ops/randint.h>

namespace demo {
namespace {

constexpr int64_t kDepth = 6;

struct Result {
  int64_t parameters;
  double gradient_norm;
};

// Gradient norm of the embedding for the loss sum(out²): the same weights and tokens for both
// orders.
Result measure(const Setup& setup, uint64_t seed, bool pre_ln) {
  at::manual_seed(seed);
  attn::BlockStack stack(attn::BlockOptions()
                             .d_model(192)
                             .num_heads(6)
                             .context_length(64)
                             .attn_dropout(0.0)
                             .residual_dropout(0.0)
                             .pre_ln(pre_ln),
                         kDepth);
  const auto tokens = at::randint(0, 128, {2, 32}, at::TensorOptions(at::kLong));  // [B, T]
  stack->to(setup.device);
  stack(tokens.to(setup.device)).square().sum().backward();
  return {attn::count_parameters(*stack), stack->embed->weight.grad().norm().item<double>()};
}

}  // namespace

void tell_block_stack(Report& report, const Setup& setup, uint64_t seed) {
  report.chapter("block_stack", "Six blocks deep: LayerNorm before each half, or after it");
  const auto pre = measure(setup, seed, /*pre_ln=*/true);
  const auto post = measure(setup, seed, /*pre_ln=*/false);
  const double ratio = pre.gradient_norm / post.gradient_norm;

  report.line("Gradient norm at the embedding, loss = sum(out²), the same weights:");
  report.line();
  report.value("parameters", "parameters", pre.parameters, "each");
  report.value("pre_ln_gradient_norm", "pre-LN", pre.gradient_norm);
  report.value("post_ln_gradient_norm", "post-LN", post.gradient_norm);
  report.value("ratio", "ratio", ratio);
  report.line();
  report.check("both stacks have 2,694,144 parameters",
               pre.parameters == 2694144 && post.parameters == 2694144);
  report.check("pre-LN passes more than 100 times the gradient", ratio > 100.0);
}

}  // namespace demo
