#include "attention_check.h"
#include "commands.h"
#include "module_peers.h"
#include "serve.h"
#include "session.h"
#include "support/program.h"

#include <attn/modules/multi_head_self_attention.h>
#include <attn/modules/self_attention.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/activation.h>

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <functional>

namespace bench {
namespace {

struct ModuleShape {
  int64_t B, T, C, H;

  std::string name() const { return fmt::format("{},{},{},{}", B, T, C, H); }
};

constexpr std::array kShapes = {ModuleShape{1, 4, 8, 2}, ModuleShape{2, 5, 16, 4},
                                ModuleShape{4, 16, 32, 4}, ModuleShape{16, 12, 32, 4},
                                ModuleShape{8, 64, 128, 8}};
constexpr size_t kInputs = 8;        // taken in turn
constexpr double kTolerance = 2e-5;  // of the greatest value; see attention_check.cpp

using Forward = std::function<at::Tensor(const at::Tensor&)>;

// One of our modules and its weights.
struct Ours {
  Forward forward;
  Projections projections;
};

Ours self_attention(const ModuleShape& shape) {
  attn::SelfAttention module(shape.C, shape.H);
  module->eval();
  return {[module](const at::Tensor& x) mutable { return module->forward(x); },
          {module->qkv->weight, module->proj->weight, std::nullopt, std::nullopt, shape.H}};
}

Ours multi_head_self_attention(const ModuleShape& shape) {
  attn::MultiHeadSelfAttention module(shape.C, shape.H, shape.T);
  module->eval();
  return {[module](const at::Tensor& x) mutable { return module->forward(x); },
          {module->qkv_proj->weight, module->out_proj->weight, module->qkv_proj->bias,
           module->out_proj->bias, shape.H}};
}

// LibTorch's module with our weights. x is [T, B, C], the only layout that it knows.
Forward multihead_attention(const ModuleShape& shape, const Projections& ours) {
  const bool bias = ours.qkv_bias.has_value();
  torch::nn::MultiheadAttention module(
      torch::nn::MultiheadAttentionOptions(shape.C, shape.H).bias(bias));
  module->eval();
  {
    const c10::NoGradGuard no_grad;
    module->in_proj_weight.copy_(ours.qkv_weight);
    module->out_proj->weight.copy_(ours.out_weight);
    if (bias) {
      module->in_proj_bias.copy_(*ours.qkv_bias);
      module->out_proj->bias.copy_(*ours.out_bias);
    }
  }
  // Additive: a bool mask is not honoured.
  const auto future = at::ones({shape.T, shape.T}, at::kBool).triu(1);
  const auto mask = at::zeros({shape.T, shape.T}).masked_fill(future, -INFINITY);
  return [module, mask](const at::Tensor& x) mutable {
    return std::get<0>(
        module->forward(x, x, x, /*key_padding_mask=*/{}, /*need_weights=*/false, mask));
  };
}

std::vector<at::Tensor> random_inputs(const ModuleShape& shape) {
  const c10::InferenceMode inference;
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < kInputs; ++i) inputs.push_back(at::randn({shape.B, shape.T, shape.C}));
  return inputs;
}

std::vector<at::Tensor> sequence_first(const std::vector<at::Tensor>& inputs) {
  const c10::InferenceMode inference;
  std::vector<at::Tensor> result;
  for (const auto& x : inputs) result.push_back(x.transpose(0, 1).contiguous());  // [T, B, C]
  return result;
}

Contender contender(const std::string& name, const Forward& forward,
                    const std::vector<at::Tensor>& inputs) {
  return {name, [forward, inputs, next = size_t{0}](int64_t iterations) mutable {
            const c10::InferenceMode inference;
            for (int64_t i = 0; i < iterations; ++i) {
              forward(inputs[next]);
              next = (next + 1) % inputs.size();
            }
          }};
}

Work work_of(const ModuleShape& shape) {
  const auto B = static_cast<double>(shape.B), T = static_cast<double>(shape.T);
  const auto C = static_cast<double>(shape.C), H = static_cast<double>(shape.H);
  const double pairs = B * T * (T + 1) / 2;
  return {8 * B * T * C * C + 4 * C * pairs, H * pairs};
}

Entry entry(const ModuleShape& shape, const Ours& ours) {
  const auto inputs = random_inputs(shape);
  const auto first = sequence_first(inputs);
  const auto future = at::ones({shape.T, shape.T}, at::kBool).triu(1);  // [T, T]
  const auto& projections = ours.projections;
  const Forward chain = [=](const at::Tensor& x) { return op_chain(projections, x, future); };
  const Forward sdpa = [=](const at::Tensor& x) { return linear_sdpa_linear(projections, x); };
  const auto peer = multihead_attention(shape, projections);
  {
    const c10::InferenceMode inference;
    const auto expected = chain(inputs[0]);
    check_close("ours, " + shape.name(), ours.forward(inputs[0]), expected, kTolerance);
    check_close("SDPA, " + shape.name(), sdpa(inputs[0]), expected, kTolerance);
    check_close("nn::MultiheadAttention, " + shape.name(), peer(first[0]).transpose(0, 1), expected,
                kTolerance);
  }
  return {shape.name(),
          contender("ours", ours.forward, inputs),
          {contender("op chain", chain, inputs), contender("linear+SDPA", sdpa, inputs),
           contender("nn::Multihead", peer, first)},
          {Floor{.work = work_of(shape)}}};
}

void bench_kind(Session& session, const char* name, const char* title,
                Ours (*make)(const ModuleShape&)) {
  session.begin({.name = name,
                 .title = title,
                 .legend = "B,T,C,H",
                 .peers = {"op chain", "linear+SDPA", "nn::Multihead"},
                 .floors = {"floor"}});
  for (const auto& shape : kShapes) {
    if (!session.wants(shape.name())) continue;
    at::manual_seed(0);
    session.add(entry(shape, make(shape)));
  }
  session.end();
}

ModuleShape parse_shape(const std::string& text) {
  std::array<int64_t, 4> sizes{};
  const char* next = text.data();
  const char* end = next + text.size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto [stop, error] = std::from_chars(next, end, sizes[i]);
    const bool last = i + 1 == sizes.size();
    if (error != std::errc() || sizes[i] < 1 ||
        (last ? stop != end : stop == end || *stop != ',')) {
      throw apps::UsageError(fmt::format("a shape must be B,T,C,H, got {}", text));
    }
    next = stop + 1;
  }
  return {sizes[0], sizes[1], sizes[2], sizes[3]};
}

}  // namespace

void bench_module(Session& session) {
  bench_kind(session, "SelfAttention", "SelfAttention, inference, float32", self_attention);
  bench_kind(session, "MultiHeadSelfAttention", "MultiHeadSelfAttention, inference, float32",
             multi_head_self_attention);
}

Served serve_module(const std::string& kind, const std::string& shape_text) {
  if (kind != "module" && kind != "multi_head") {
    throw apps::UsageError(fmt::format("must be module, multi_head or lm, got {}", kind));
  }
  const auto shape = parse_shape(shape_text);
  const auto make = kind == "module" ? self_attention : multi_head_self_attention;
  at::manual_seed(0);
  const auto ours = make(shape);
  const auto fingerprint = [make, shape] {
    const c10::InferenceMode inference;
    at::manual_seed(0);
    const auto module = make(shape);
    const auto y = module.forward(at::randn({shape.B, shape.T, shape.C})).to(at::kDouble).flatten();
    const auto ramp = at::linspace(-1.0, 1.0, y.numel(), at::TensorOptions(at::kDouble));
    return std::vector<double>{y.abs().sum().item<double>(), (y * ramp).sum().item<double>()};
  };
  return {contender("ours", ours.forward, random_inputs(shape)), fingerprint};
}

}  // namespace bench
