#include "stories.h"
#include "tensors.h"

#include <attn/functional.h>
#include <attn/modules/self_attention.h>
#include <attn/state_dict.h>
#include <attn/summary.h>

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>

#include <fmt/format.h>

#include <cmath>

namespace demo {
namespace {

// The first seed document's example: B = 1, T = 4, C = 8, H = 2, and another value at position 2.
struct Example {
  attn::SelfAttention attention;
  at::Tensor x;            // [B, T, C]
  at::Tensor x_perturbed;  // the same but for one position
};

constexpr int64_t kWidth = 8;
constexpr int64_t kHeads = 2;
constexpr int64_t kPerturbed = 2;

Example draw_example(const Setup& setup, uint64_t seed) {
  at::manual_seed(seed);
  attn::SelfAttention attention(kWidth, kHeads);
  const auto x = at::randn({1, 4, kWidth});
  auto x_perturbed = x.clone();
  x_perturbed[0][kPerturbed] = at::randn({kWidth});
  attention->to(setup.device);
  return {attention, x.to(setup.device), x_perturbed.to(setup.device)};
}

void walk_through_shapes(Report& report, Example& example) {
  namespace F = attn::functional;
  auto& attention = *example.attention;
  const auto& x = example.x;

  const auto qkv = attention.qkv(x);                // [B, T, 3C]
  const auto parts = qkv.split(kWidth, /*dim=*/2);  // 3 x [B, T, C]
  const auto q = F::split_heads(parts[0], kHeads);  // [B, H, T, D]
  const auto k = F::split_heads(parts[1], kHeads);  // [B, H, T, D]
  const auto v = F::split_heads(parts[2], kHeads);  // [B, H, T, D]
  const auto scores =                               // [B, H, T, T]
      at::matmul(q, k.transpose(-2, -1)) / std::sqrt(static_cast<double>(kWidth / kHeads));
  const auto [heads, weights] = F::attention_with_weights(q, k, v);  // [B, H, T, D], [B, H, T, T]
  const auto output = attention.proj(F::merge_heads(heads));         // [B, T, C]

  const auto row = [&report](const char* key, const char* name, const char* letters,
                             const at::Tensor& tensor, const char* remark) {
    report.shape(key, name, letters, tensor.sizes().vec(), remark);
  };
  row("x", "x", "[B, T, C]", x, "the input");
  row("qkv", "qkv", "[B, T, 3C]", qkv, "one projection, three views");
  row("q", "q, k, v", "[B, H, T, D]", q, "split into heads");
  row("scores", "scores", "[B, H, T, T]", scores, "q kᵀ / √D");
  row("weights", "weights", "[B, H, T, T]", weights, "masked, then softmax over the keys");
  row("heads", "heads", "[B, H, T, D]", heads, "weights · v");
  row("output", "output", "[B, T, C]", output, "heads merged and projected");
  report.line();

  const auto parameters = attn::count_parameters(attention);
  report.value("parameters", "parameters", parameters, "= 4C²");
  report.line();
  report.check("the output has the input's shape", output.sizes() == x.sizes());
  report.check("there are 4C² = 256 parameters", parameters == 4 * kWidth * kWidth);
  report.check("these steps give what the module gives",
               greatest_difference(output, attention.forward(x)) < 1e-6);
}

// Greatest change of the output at each position when the input changes at one.
std::vector<double> response(attn::SelfAttention& attention, const Example& example) {
  const auto difference = attention(example.x) - attention(example.x_perturbed);  // [B, T, C]
  return values_of(difference.abs().amax({0, 2}));                                // [T]
}

void show_causality(Report& report, const Setup& setup, Example& example, uint64_t seed) {
  const auto causal = response(example.attention, example);

  attn::SelfAttention bidirectional(attn::SelfAttentionOptions(kWidth, kHeads).causal(false));
  bidirectional->to(setup.device);
  attn::load_state_dict(*bidirectional, attn::state_dict(*example.attention));
  const auto unmasked = response(bidirectional, example);

  report.line(
      fmt::format("{:<28}{:>10}{:>10}{:>10}{:>10}", "greatest change at position", 0, 1, 2, 3));
  report.series("causal", "causal", causal);
  report.series("causal_false", "causal(false), same weights", unmasked);
  report.line();

  report.check("causal: positions 0 and 1 do not move, not by one bit",
               causal[0] == 0.0 && causal[1] == 0.0);
  report.check("causal: positions 2 and 3 move", causal[2] > 0.0 && causal[3] > 0.0);
  report.check("without the mask positions 0 and 1 move too",
               unmasked[0] > 0.0 && unmasked[1] > 0.0);
  // 0.3175 and 0.2455: PyTorch's Python code, the same draws.
  report.check_if(seed == Options::kSelfAttentionSeed, "seed 0",
                  "positions 2 and 3 move by 0.3175 and 0.2455, as in Python",
                  std::abs(causal[2] - 0.3175) < 1e-4 && std::abs(causal[3] - 0.2455) < 1e-4);
}

}  // namespace

void tell_self_attention(Report& report, const Setup& setup, uint64_t seed) {
  const c10::NoGradGuard no_grad;
  auto example = draw_example(setup, seed);

  report.chapter("self_attention", "SelfAttention(n_embd = 8, n_head = 2): the shape walk");
  walk_through_shapes(report, example);

  report.chapter("causality", "Causality: change the input at position 2 only, and run again");
  show_causality(report, setup, example, seed);
}

}  // namespace demo
