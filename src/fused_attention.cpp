#include "fused_attention.h"

#include "kernels/attention.h"
#include "kernels/instruction_set.h"
#include "math_attention.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <mutex>

namespace attn::functional {
namespace {

// ---- From tensors to the kernels' arguments

// LibTorch's ATEN_CPU_CAPABILITY holds our kernels down too.
void respect_cpu_capability() {
  static const bool done = [] {
    const auto capability = at::get_cpu_capability();
    if (capability == "AVX2") kernels::limit_instruction_set("AVX2");
    if (capability == "DEFAULT" || capability == "NO AVX") kernels::limit_instruction_set("SSE4");
    return true;
  }();
  static_cast<void>(done);
}

kernels::Parallel parallel() {
  respect_cpu_capability();
  return {at::get_num_threads(), [](int n, void (*work)(void*, int), void* data) {
            at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) work(data, static_cast<int>(i));
            });
          }};
}

kernels::Allocator allocator() {
  return {[](uint64_t bytes) { return c10::GetCPUAllocator()->raw_allocate(bytes); },
          [](void* pointer) { c10::GetCPUAllocator()->raw_deallocate(pointer); }};
}

template <typename Element>
constexpr auto scalar_type() {
  return std::is_same_v<Element, float> ? at::kFloat : at::kBFloat16;
}

// Calls f with a value of the kernels' element type for x's dtype.
template <class F>
auto with_element(const Tensor& x, const F& f) {
  return x.scalar_type() == at::kFloat ? f(float()) : f(kernels::BFloat16());
}

template <typename Element>
const Element* data(const Tensor& x) {
  return static_cast<const Element*>(x.const_data_ptr());
}
template <typename Element>
Element* mutable_data(const Tensor& x) {
  return static_cast<Element*>(x.mutable_data_ptr());
}

// [B, H, rows, D], as the kernels see it.
template <typename Element>
kernels::Heads<const Element> heads(const Tensor& x) {
  return {data<Element>(x), {x.stride(0), x.stride(1), x.stride(2)}};
}
template <typename Element>
kernels::Heads<Element> mutable_heads(const Tensor& x) {
  return {mutable_data<Element>(x), {x.stride(0), x.stride(1), x.stride(2)}};
}

// The third `part` of [B, T, 3C] (of 3) or the whole of [B, T, C] (of 1).
template <typename Pointer>
auto packed_heads(const Tensor& x, Pointer* start, int64_t n_head, int64_t part, int64_t parts) {
  const int64_t C = x.size(2) / parts;
  auto* const first =
      start == nullptr ? nullptr : start + part * C;  // an empty batch has no memory
  return kernels::Heads<Pointer>{first, {x.stride(0), C / n_head, x.stride(1)}};
}

Tensor rows_contiguous(const Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous();
}

kernels::Problem problem(int64_t B, int64_t H, int64_t Hkv, int64_t T, int64_t S, int64_t D,
                         const FusedCall& call, const Tensor& padding, const Tensor& seed) {
  kernels::Problem p;
  p.B = B, p.H = H, p.Hkv = Hkv, p.T = T, p.S = S, p.D = D;
  p.scale = static_cast<float>(call.scale);
  p.causal = call.causal;
  if (padding.defined()) {
    p.key_padding = padding.const_data_ptr<bool>();
    p.key_padding_row = padding.stride(0);
  }
  p.dropout_p = static_cast<float>(call.dropout_p);
  if (call.dropout_p > 0.0)
    p.dropout_seed = static_cast<uint64_t>(seed.const_data_ptr<int64_t>()[0]);
  return p;
}

Tensor padding_rows(const FusedCall& call) {
  return call.key_padding_mask.defined() ? rows_contiguous(call.key_padding_mask) : Tensor();
}

// One draw of the given or the default generator; nothing is drawn without dropout.
Tensor draw_seed(const FusedCall& call) {
  if (call.dropout_p <= 0.0) return at::empty({0}, at::kLong);
  auto seed = at::empty({1}, at::kLong);
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      call.generator, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  seed.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(generator->random64());
  return seed;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> fused_forward(const Tensor& query, const Tensor& key,
                                                 const Tensor& value, const FusedCall& call,
                                                 bool want_logsumexp) {
  const auto q = rows_contiguous(query), k = rows_contiguous(key), v = rows_contiguous(value),
             padding = padding_rows(call);
  const int64_t B = q.size(0), H = q.size(1), T = q.size(2), D = q.size(3);
  const auto seed = draw_seed(call);
  const auto out = at::empty({B, T, H, D}, q.options()).transpose(1, 2);  // [B, H, T, D]
  const auto logsumexp =
      want_logsumexp ? at::empty({B, H, T}, at::kFloat) : at::empty({0}, at::kFloat);
  with_element(q, [&](auto element) {
    using Element = decltype(element);
    kernels::ForwardArguments<Element> a;
    a.problem = problem(B, H, k.size(1), T, k.size(2), D, call, padding, seed);
    a.q = heads<Element>(q), a.k = heads<Element>(k), a.v = heads<Element>(v);
    a.out = mutable_heads<Element>(out);
    a.logsumexp = want_logsumexp ? logsumexp.template mutable_data_ptr<float>() : nullptr;
    kernels::attention_forward(a, parallel(), allocator());
  });
  return {out, logsumexp, seed};
}

std::tuple<Tensor, Tensor, Tensor> fused_backward(const Tensor& grad, const Tensor& query,
                                                  const Tensor& key, const Tensor& value,
                                                  const Tensor& result, const Tensor& logsumexp,
                                                  const Tensor& seed, const FusedCall& call,
                                                  const std::array<bool, 3>& wanted) {
  const auto q = rows_contiguous(query), k = rows_contiguous(key), v = rows_contiguous(value),
             padding = padding_rows(call);
  const auto out = rows_contiguous(result), grad_out = rows_contiguous(grad);
  // As [B, rows, H, D] in memory: what a projection's backward reads next.
  const auto grad_of = [](const Tensor& x, bool is_wanted) {
    if (!is_wanted) return at::empty({0, 0, 0, 0}, x.options());
    return at::empty({x.size(0), x.size(2), x.size(1), x.size(3)}, x.options()).transpose(1, 2);
  };
  const auto grad_q = grad_of(q, wanted[0]), grad_k = grad_of(k, wanted[1]),
             grad_v = grad_of(v, wanted[2]);
  with_element(q, [&](auto element) {
    using Element = decltype(element);
    kernels::BackwardArguments<Element> a;
    a.problem = problem(q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), call,
                        padding, seed);
    a.q = heads<Element>(q), a.k = heads<Element>(k), a.v = heads<Element>(v);
    a.out = heads<Element>(out), a.grad_out = heads<Element>(grad_out);
    a.logsumexp = logsumexp.const_data_ptr<float>();
    a.wants_q = wanted[0], a.wants_k = wanted[1], a.wants_v = wanted[2];
    a.grad_q = mutable_heads<Element>(grad_q), a.grad_k = mutable_heads<Element>(grad_k),
    a.grad_v = mutable_heads<Element>(grad_v);
    kernels::attention_backward(a, parallel(), allocator());
  });
  return {grad_q, grad_k, grad_v};
}

std::tuple<Tensor, Tensor, Tensor> fused_packed_forward(const Tensor& packed, int64_t n_head,
                                                        const FusedCall& call,
                                                        bool want_logsumexp) {
  const auto qkv = rows_contiguous(packed), padding = padding_rows(call);
  const int64_t B = qkv.size(0), T = qkv.size(1), C = qkv.size(2) / 3;
  const auto seed = call.dropout_p > 0.0 ? draw_seed(call) : Tensor();
  const auto out = at::empty({B, T, C}, qkv.options());
  const auto logsumexp = want_logsumexp ? at::empty({B, n_head, T}, at::kFloat) : Tensor();
  with_element(qkv, [&](auto element) {
    using Element = decltype(element);
    kernels::ForwardArguments<Element> a;
    a.problem = problem(B, n_head, n_head, T, T, C / n_head, call, padding, seed);
    const auto* start = data<Element>(qkv);
    a.q = packed_heads(qkv, start, n_head, 0, 3), a.k = packed_heads(qkv, start, n_head, 1, 3),
    a.v = packed_heads(qkv, start, n_head, 2, 3);
    a.out = packed_heads(out, mutable_data<Element>(out), n_head, 0, 1);
    a.logsumexp = want_logsumexp ? logsumexp.template mutable_data_ptr<float>() : nullptr;
    kernels::attention_forward(a, parallel(), allocator());
  });
  return {out, logsumexp, seed};
}

Tensor fused_packed_backward(const Tensor& grad, const Tensor& packed, int64_t n_head,
                             const Tensor& result, const Tensor& logsumexp, const Tensor& seed,
                             const FusedCall& call) {
  const auto qkv = rows_contiguous(packed), padding = padding_rows(call);
  const auto out = rows_contiguous(result), grad_out = rows_contiguous(grad);
  const int64_t B = qkv.size(0), T = qkv.size(1), C = qkv.size(2) / 3;
  const auto grad_qkv = at::empty({B, T, 3 * C}, qkv.options());
  with_element(qkv, [&](auto element) {
    using Element = decltype(element);
    kernels::BackwardArguments<Element> a;
    a.problem = problem(B, n_head, n_head, T, T, C / n_head, call, padding, seed);
    const auto* start = data<Element>(qkv);
    a.q = packed_heads(qkv, start, n_head, 0, 3), a.k = packed_heads(qkv, start, n_head, 1, 3),
    a.v = packed_heads(qkv, start, n_head, 2, 3);
    a.out = packed_heads(out, data<Element>(out), n_head, 0, 1);
    a.grad_out = packed_heads(grad_out, data<Element>(grad_out), n_head, 0, 1);
    a.logsumexp = logsumexp.const_data_ptr<float>();
    auto* to = mutable_data<Element>(grad_qkv);
    a.grad_q = packed_heads(grad_qkv, to, n_head, 0, 3),
    a.grad_k = packed_heads(grad_qkv, to, n_head, 1, 3),
    a.grad_v = packed_heads(grad_qkv, to, n_head, 2, 3);
    kernels::attention_backward(a, parallel(), allocator());
  });
  return grad_qkv;
}

std::string fused_cpu_obstacle(const Tensor& x) {
  if (!x.is_cpu()) return "a tensor on " + x.device().str();
  if (x.scalar_type() != at::kFloat && x.scalar_type() != at::kBFloat16)
    return std::string("dtype ") + c10::toString(x.scalar_type());
  return "";
}

bool is_plain_cpu(const Tensor& x) {
  constexpr c10::DispatchKeySet kOrdinary({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                                           c10::DispatchKey::AutogradCPU,
                                           c10::DispatchKey::AutocastCPU});
  const auto local = c10::impl::tls_local_dispatch_key_set();
  // By bits: DispatchKeySet's own difference keeps the left side's backend.
  const auto beyond = [](c10::DispatchKeySet keys, c10::DispatchKeySet ordinary) {
    return keys.raw_repr() & ~ordinary.raw_repr();
  };
  return beyond(x.key_set(), kOrdinary) == 0 &&
         beyond(local.included_, c10::default_included_set) == 0 &&
         // Below autograd a graph must not be recorded; in InferenceMode none would be.
         (!local.excluded_.has(c10::DispatchKey::AutogradCPU) || !at::GradMode::is_enabled()) &&
         !at::autocast::is_autocast_enabled(at::kCPU) && !x._fw_grad(/*level=*/0).defined();
}

Tensor small_module(const Tensor& x, const ModuleWeights& weights, int64_t n_head,
                    const AttentionOptions& options) {
  if (options.implementation() == Implementation::math || options.dropout_p() > 0.0) return {};
  const int64_t B = x.size(0), T = x.size(1), C = x.size(2);
  const auto plain = [](const Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat && is_plain_cpu(tensor) &&
           !(at::GradMode::is_enabled() && tensor.requires_grad());
  };
  const auto fits = [&](const Tensor& weight, const Tensor& bias, int64_t outputs) {
    if (!plain(weight) || weight.dim() != 2 || weight.size(0) != outputs || weight.size(1) != C ||
        weight.stride(1) != 1) {
      return false;
    }
    return !bias.defined() ||
           (plain(bias) && bias.dim() == 1 && bias.size(0) == outputs && bias.stride(0) == 1);
  };
  const auto& mask = options.key_padding_mask();
  if (!plain(x) || !fits(weights.qkv_weight, weights.qkv_bias, 3 * C) ||
      !fits(weights.proj_weight, weights.proj_bias, C)) {
    return {};
  }
  if (mask.defined() && !(mask.scalar_type() == at::kBool && is_plain_cpu(mask) &&
                          mask.dim() == 2 && mask.size(0) == B && mask.size(1) == T)) {
    return {};  // the ordinary path says what is wrong with it
  }
  const int64_t D = C / n_head;
  const FusedCall call{options.causal(), 0.0,
                       options.scale().value_or(1.0 / std::sqrt(static_cast<double>(D))), mask,
                       std::nullopt};
  const auto padding = padding_rows(call);
  kernels::ModuleArguments a;
  a.problem = problem(B, n_head, n_head, T, T, D, call, padding, Tensor());
  const auto threads = parallel();
  if (!kernels::module_forward_pays(a.problem, threads.threads)) return {};
  const auto rows = x.is_contiguous() ? x : x.contiguous();
  const auto out = at::empty({B, T, C}, x.options());
  const auto projection = [](const Tensor& weight, const Tensor& bias) {
    return kernels::Projection{data<float>(weight), weight.stride(0),
                               bias.defined() ? data<float>(bias) : nullptr};
  };
  a.x = data<float>(rows);
  a.out = mutable_data<float>(out);
  a.qkv = projection(weights.qkv_weight, weights.qkv_bias);
  a.proj = projection(weights.proj_weight, weights.proj_bias);
  kernels::module_forward(a, threads, allocator());
  return out;
}

}  // namespace attn::functional
