#include "attn/training.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numbers>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace attn {
namespace {

void check_lr(double lr) {
  TORCH_CHECK_VALUE(std::isfinite(lr) && lr >= 0.0, "lr must be finite and at least 0, got ", lr);
}

void check_beta(const char* name, double beta) {
  TORCH_CHECK_VALUE(beta >= 0.0 && beta < 1.0, name, " must be in [0, 1), got ", beta);
}

void check(const AdamWOptions& o) {
  check_lr(o.lr);
  check_beta("beta1", o.beta1);
  check_beta("beta2", o.beta2);
  TORCH_CHECK_VALUE(std::isfinite(o.eps) && o.eps >= 0.0, "eps must be finite and at least 0, got ",
                    o.eps);
  TORCH_CHECK_VALUE(std::isfinite(o.weight_decay) && o.weight_decay >= 0.0,
                    "weight_decay must be finite and at least 0, got ", o.weight_decay);
}

// The fused kernel walks the storages side by side: what it gets must lie in memory alike.
Tensor laid_out_as(const Tensor& parameter, const Tensor& grad) {
  if (grad.strides() == parameter.strides()) return grad;
  return at::empty_like(parameter).copy_(grad);
}

// The arguments of one call of the fused kernel, which wants one decay, dtype and device.
struct Bucket {
  std::vector<Tensor> values, grads, exp_avgs, exp_avg_sqs, steps;
};

}  // namespace

// ---- AdamW

AdamW::AdamW(const torch::nn::Module& module, const AdamWOptions& options) : options_(options) {
  check(options);
  const c10::NoGradGuard no_grad;
  std::unordered_set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    const auto& value = item.value();
    if (!value.defined() || !value.requires_grad()) continue;
    if (!seen.insert(value.unsafeGetTensorImpl()).second) continue;
    TORCH_CHECK_VALUE(value.layout() == at::kStrided && value.is_non_overlapping_and_dense() &&
                          value.is_floating_point(),
                      item.key(), " must be a dense floating-point tensor, got ", value.toString(),
                      " ", value.sizes(), " with strides ", value.strides());
    parameters_.push_back({item.key(), value, at::zeros_like(value), at::zeros_like(value),
                           at::zeros({}, value.options().dtype(at::kFloat))});
  }
  TORCH_CHECK_VALUE(!parameters_.empty(),
                    "the module must have a parameter that requires a gradient, got none");
}

void AdamW::step() {
  const c10::NoGradGuard no_grad;
  using Key = std::tuple<bool, at::ScalarType, std::string>;  // decays, dtype, device
  std::map<Key, Bucket> buckets;
  for (const auto& p : parameters_) {
    const auto& grad = p.value.grad();
    if (!grad.defined()) continue;
    TORCH_CHECK_VALUE(grad.layout() == at::kStrided, "the gradient of ", p.name,
                      " must be dense, got ", grad.layout());
    TORCH_CHECK_VALUE(
        p.value.scalar_type() == p.exp_avg.scalar_type() && p.value.device() == p.exp_avg.device(),
        p.name, " must stay ", p.exp_avg.scalar_type(), " on ", p.exp_avg.device(),
        " (make the optimiser after moving the module), got ", p.value.scalar_type(), " on ",
        p.value.device());
    auto& bucket = buckets[{p.value.dim() >= 2, p.value.scalar_type(), p.value.device().str()}];
    bucket.values.push_back(p.value);
    bucket.grads.push_back(laid_out_as(p.value, grad));
    bucket.exp_avgs.push_back(p.exp_avg);
    bucket.exp_avg_sqs.push_back(p.exp_avg_sq);
    bucket.steps.push_back(p.step);
  }
  for (auto& [key, bucket] : buckets) {
    at::_foreach_add_(bucket.steps, 1);  // the kernel takes the number of the step that it makes
    const double decay = std::get<0>(key) ? options_.weight_decay : 0.0;
    at::_fused_adamw_(bucket.values, bucket.grads, bucket.exp_avgs, bucket.exp_avg_sqs,
                      /*max_exp_avg_sqs=*/{}, bucket.steps, options_.lr, options_.beta1,
                      options_.beta2, decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  }
}

void AdamW::zero_grad() {
  for (auto& p : parameters_) p.value.mutable_grad().reset();
}

void AdamW::set_lr(double lr) {
  check_lr(lr);
  options_.lr = lr;
}

StateDict AdamW::state_dict() const {
  StateDict state("state_dict");
  std::vector<int64_t> steps;
  for (const auto& p : parameters_) {
    state.insert("exp_avg." + p.name, p.exp_avg);
    state.insert("exp_avg_sq." + p.name, p.exp_avg_sq);
    steps.push_back(static_cast<int64_t>(p.step.item<float>()));
  }
  state.insert("step", at::tensor(steps, at::kLong));
  return state;
}

void AdamW::load_state_dict(const StateDict& state) {
  const auto own = state_dict();
  LoadReport report;
  for (const auto& item : own) {
    const auto& target = item.value();
    const auto* source = state.find(item.key());
    if (source == nullptr) {
      report.missing_keys.push_back(item.key());
    } else if (!source->defined() || source->layout() != at::kStrided || source->is_meta()) {
      report.mismatched.push_back(item.key() + ": must be a dense tensor with values");
    } else if (source->sizes() != target.sizes() || source->scalar_type() != target.scalar_type()) {
      report.mismatched.push_back(c10::str(item.key(), ": must be ", target.scalar_type(), " ",
                                           target.sizes(), ", got ", source->scalar_type(), " ",
                                           source->sizes()));
    } else if (item.key() == "step" && source->lt(0).any().item<bool>()) {
      report.mismatched.push_back("step: must be at least 0, got " +
                                  std::to_string(source->min().item<int64_t>()));
    }
  }
  for (const auto& item : state) {
    if (!own.contains(item.key())) report.unexpected_keys.push_back(item.key());
  }
  TORCH_CHECK_VALUE(report.ok(), "state_dict must fit the optimiser, got ", report.to_string());

  const c10::NoGradGuard no_grad;
  const auto steps = state["step"].cpu();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& p = parameters_[i];
    p.exp_avg.copy_(state["exp_avg." + p.name]);
    p.exp_avg_sq.copy_(state["exp_avg_sq." + p.name]);
    p.step.fill_(steps[static_cast<int64_t>(i)].item<int64_t>());
  }
}

// ---- Clipping and schedule

double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm) {
  TORCH_CHECK_VALUE(max_norm >= 0.0, "max_norm must be at least 0, got ", max_norm);
  const c10::NoGradGuard no_grad;
  std::vector<Tensor> grads;
  std::unordered_set<const void*> seen;
  auto dtype = at::kFloat;
  for (const auto& p : parameters) {
    if (!p.defined() || !p.grad().defined()) continue;
    if (!seen.insert(p.unsafeGetTensorImpl()).second) continue;
    grads.push_back(p.grad());
    TORCH_CHECK_VALUE(grads.back().device() == grads[0].device(),
                      "the gradients must be on one device, got ", grads[0].device(), " and ",
                      grads.back().device());
    if (grads.back().scalar_type() == at::kDouble) dtype = at::kDouble;
  }
  if (grads.empty()) return 0.0;
  const auto norms = at::_foreach_norm(grads, 2, dtype);
  const auto norm = at::linalg_vector_norm(at::stack(norms), 2);  // []
  // Python's arithmetic, in the norm's dtype; multiplying by 1 spares a wait for the device.
  at::_foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp_max(1.0));
  return norm.item<double>();
}

double WarmupCosine::at(int64_t step) const {
  TORCH_CHECK_VALUE(std::isfinite(peak) && least >= 0.0 && least <= peak,
                    "learning rates must be finite with 0 <= least <= peak, got least ", least,
                    " and peak ", peak);
  TORCH_CHECK_VALUE(warmup_steps >= 0 && warmup_steps <= total_steps,
                    "warmup_steps must be in [0, total_steps (", total_steps, ")], got ",
                    warmup_steps);
  TORCH_CHECK_VALUE(step >= 0, "step must be at least 0, got ", step);
  if (step < warmup_steps)
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  if (step >= total_steps) return least;
  const double progress = static_cast<double>(step - warmup_steps) /
                          static_cast<double>(total_steps - warmup_steps);  // in [0, 1)
  return least + 0.5 * (peak - least) * (1.0 + std::cos(std::numbers::pi * progress));
}

// ---- Chunked cross entropy

namespace {

constexpr int64_t kChunkBytes = int64_t{64} << 20;

// What is computed in: softmax needs float32 at least.
at::ScalarType softmax_dtype(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// A sum over chunks of products [V, C], kept in float32 where the products are of lower precision.
class WeightGradient {
 public:
  explicit WeightGradient(const Tensor& weight)
      : sum_(at::zeros(weight.sizes(), weight.options().dtype(softmax_dtype(weight)))) {}

  /// grad_logits [n, V], hidden [n, C].
  void add(const Tensor& grad_logits, const Tensor& hidden) {
    if (hidden.scalar_type() == sum_.scalar_type()) {
      sum_.addmm_(grad_logits.t(), hidden);
    } else {
      sum_.add_(at::mm(grad_logits.t(), hidden));
    }
  }
  Tensor as(const Tensor& weight) const { return sum_.to(weight.scalar_type()); }

 private:
  Tensor sum_;
};

class ChunkedCrossEntropy : public torch::autograd::Function<ChunkedCrossEntropy> {
 public:
  using Context = torch::autograd::AutogradContext;
  using Wanted = std::array<bool, 3>;  // gradients of hidden, weight, bias

  static Tensor forward(Context* context, const Tensor& hidden, const Tensor& weight,
                        const std::optional<Tensor>& bias, const Tensor& targets, int64_t chunk,
                        Wanted wanted) {
    const int64_t N = hidden.size(0);
    const auto dtype = softmax_dtype(hidden);
    const bool any = wanted[0] || wanted[1] || wanted[2];
    auto sum = at::zeros({}, hidden.options().dtype(at::kDouble));
    Tensor grad_hidden, grad_bias;
    std::optional<WeightGradient> grad_weight;
    if (wanted[0]) grad_hidden = at::empty_like(hidden, at::MemoryFormat::Contiguous);
    if (wanted[1]) grad_weight.emplace(weight);
    if (wanted[2]) grad_bias = at::zeros(bias->sizes(), bias->options().dtype(dtype));

    for (int64_t begin = 0; begin < N; begin += chunk) {
      const int64_t n = std::min(chunk, N - begin);
      const auto h = hidden.narrow(0, begin, n);                                // [n, C]
      const auto index = targets.narrow(0, begin, n).unsqueeze(1);              // [n, 1]
      auto p = at::log_softmax(at::linear(h, weight, bias), /*dim=*/1, dtype);  // [n, V]
      sum.sub_(p.gather(1, index).sum(at::kDouble));
      if (!any) continue;
      // The mean's derivative by the logits: (softmax - one-hot) / N.
      p.exp_().scatter_add_(1, index, at::full({1, 1}, -1.0, p.options()).expand({n, 1}));
      p.div_(static_cast<double>(N));
      if (wanted[2]) grad_bias.add_(p.sum(0));
      const auto grad_logits = p.to(hidden.scalar_type());  // [n, V]
      if (wanted[0]) {
        auto out = grad_hidden.narrow(0, begin, n);  // [n, C]
        at::mm_out(out, grad_logits, weight);
      }
      if (wanted[1]) grad_weight->add(grad_logits, h);
    }
    if (grad_bias.defined()) grad_bias = grad_bias.to(bias->scalar_type());
    context->save_for_backward(
        {grad_hidden, grad_weight ? grad_weight->as(weight) : Tensor(), grad_bias});
    return sum.div_(static_cast<double>(N)).to(dtype);
  }

  static torch::autograd::variable_list backward(Context* context,
                                                 torch::autograd::variable_list grad_out) {
    torch::autograd::variable_list grads = context->get_saved_variables();
    {
      const c10::NoGradGuard no_grad;
      for (auto& grad : grads) {
        if (grad.defined()) grad = grad.mul(grad_out[0]);
      }
    }
    if (c10::GradMode::is_enabled()) refuse_second_derivatives(grads);
    grads.resize(6);  // targets, chunk and wanted have none
    return grads;
  }

 private:
  // As Python's once_differentiable: asking for a graph is fine, walking it is not.
  static void refuse_second_derivatives(torch::autograd::variable_list& grads) {
    for (auto& grad : grads) {
      if (!grad.defined()) continue;
      const auto error = std::make_shared<torch::autograd::DelayedError>(
          "chunked_cross_entropy has no second derivatives: use cross_entropy of whole logits", 1);
      grad = (*error)({grad.detach().requires_grad_()})[0];
    }
  }
};

void check_matrix(const char* name, const Tensor& x) {
  TORCH_CHECK_VALUE(
      x.defined() && x.dim() == 2 && x.is_floating_point(), name,
      " must be a floating-point matrix, got ",
      x.defined() ? c10::str(x.scalar_type(), " ", x.sizes()) : "an undefined tensor");
}

void check_alike(const char* name, const Tensor& x, const Tensor& hidden) {
  TORCH_CHECK_VALUE(x.device() == hidden.device(), name, " must be on hidden's device ",
                    hidden.device(), ", got ", x.device());
  TORCH_CHECK_VALUE(x.scalar_type() == hidden.scalar_type(), name, " must have hidden's dtype ",
                    hidden.scalar_type(), ", got ", x.scalar_type());
}

// Before any kernel sees them: on CUDA an index out of range makes the whole process unusable.
void check_targets(const Tensor& targets, int64_t vocab_size) {
  const auto [min, max] = at::aminmax(targets);
  const auto least = min.item<int64_t>(), greatest = max.item<int64_t>();
  TORCH_CHECK_VALUE(least >= 0 && greatest < vocab_size, "targets must be in [0, ", vocab_size,
                    "), got ", least < 0 ? least : greatest);
}

// Under autocast linear computes in autocast's dtype.
Tensor for_linear(const Tensor& x, const Tensor& hidden) {
  if (!x.defined() || !at::autocast::is_autocast_enabled(hidden.device().type())) return x;
  const auto device = hidden.device().type();
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), x, device);
}

}  // namespace

Tensor chunked_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                             const Tensor& bias, int64_t chunk) {
  check_matrix("hidden", hidden);
  check_matrix("weight", weight);
  const int64_t N = hidden.size(0), C = hidden.size(1), V = weight.size(0);
  TORCH_CHECK_VALUE(weight.size(1) == C, "weight must be [V, ", C, "], got ", weight.sizes());
  TORCH_CHECK_VALUE(N >= 1 && V >= 1, "hidden and weight must have at least 1 row, got ", N,
                    " and ", V);
  TORCH_CHECK_VALUE(targets.defined() && targets.scalar_type() == at::kLong &&
                        targets.sizes() == at::IntArrayRef({N}),
                    "targets must be int64 [", N, "], got ",
                    targets.defined() ? c10::str(targets.scalar_type(), " ", targets.sizes())
                                      : "an undefined tensor");
  TORCH_CHECK_VALUE(targets.device() == hidden.device(), "targets must be on hidden's device ",
                    hidden.device(), ", got ", targets.device());
  TORCH_CHECK_VALUE(!bias.defined() || bias.sizes() == at::IntArrayRef({V}), "bias must be [", V,
                    "], got ", bias.defined() ? c10::str(bias.sizes()) : "none");
  TORCH_CHECK_VALUE(chunk >= 0, "chunk must be at least 0, got ", chunk);
  const auto h = for_linear(hidden, hidden), w = for_linear(weight, hidden),
             b = for_linear(bias, hidden);
  check_alike("weight", w, h);
  if (b.defined()) check_alike("bias", b, h);
  check_targets(targets, V);

  if (chunk == 0) {
    const auto size = static_cast<int64_t>(c10::elementSize(softmax_dtype(h)));
    chunk = std::max<int64_t>(1, kChunkBytes / (V * size));
  }
  const bool grad_mode = c10::GradMode::is_enabled();
  const auto wants = [&](const Tensor& x) { return grad_mode && x.defined() && x.requires_grad(); };
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // Custom functions take no undefined tensor, but an empty optional.
  const auto maybe_b = b.defined() ? std::optional<Tensor>(b) : std::nullopt;
  return ChunkedCrossEntropy::apply(h, w, maybe_b, targets, chunk,
                                    ChunkedCrossEntropy::Wanted{wants(h), wants(w), wants(b)});
}

}  // namespace attn
