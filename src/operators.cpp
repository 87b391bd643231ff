// The operators attn::packed_self_attention and attn::attention: what Python loads with
// torch.ops.load_library, and what autograd, autocast and torch.compile see.
//
//   public    attention, packed_self_attention: composites; they choose an implementation
//   private   _forward, _backward, _packed_forward, _packed_backward: the fused CPU kernels, each
//   with a Meta kernel, so
//             that a compiled graph holds them and no Python or autograd code in between
//
// In C++ the dispatcher costs 1 to 3 µs a call, as much as a small attention: plain CPU tensors
// skip it (Direct below).

#include "fused_attention.h"
#include "math_attention.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <cmath>

namespace attn::functional {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using OptionalGenerator = std::optional<at::Generator>;
using OptionalTensor = std::optional<Tensor>;
using Wanted = std::array<bool, 3>;  // the gradients of q, k, v

FusedCall fused_call(bool causal, double dropout_p, double scale, const OptionalTensor& mask,
                     OptionalGenerator generator = {}) {
  return {causal, dropout_p, scale, mask.value_or(Tensor()), std::move(generator)};
}

OptionalTensor optional(const Tensor& x) {
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}

// ---- How a differentiable call reaches the kernels: straight, or through the dispatcher

struct Direct {
  static Three forward(const Tensor& q, const Tensor& k, const Tensor& v, const FusedCall& call) {
    return fused_forward(q, k, v, call, true);
  }
  static Three backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out, const Tensor& lse, const Tensor& seed,
                        const FusedCall& call, const Wanted& wanted) {
    return fused_backward(grad, q, k, v, out, lse, seed, call, wanted);
  }
  static Three packed_forward(const Tensor& qkv, int64_t n_head, const FusedCall& call) {
    return fused_packed_forward(qkv, n_head, call, true);
  }
  static Tensor packed_backward(const Tensor& grad, const Tensor& qkv, int64_t n_head,
                                const Tensor& out, const Tensor& lse, const Tensor& seed,
                                const FusedCall& call) {
    return fused_packed_backward(grad, qkv, n_head, out, lse, seed, call);
  }
};

using ForwardSchema = Three(const Tensor&, const Tensor&, const Tensor&, bool, double, double,
                            const OptionalTensor&, OptionalGenerator);
using BackwardSchema = Three(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&, const Tensor&, const Tensor&, bool, double, double,
                             const OptionalTensor&, Wanted);
using PackedForwardSchema = Three(const Tensor&, int64_t, bool, double, double,
                                  const OptionalTensor&, OptionalGenerator);
using PackedBackwardSchema = Tensor(const Tensor&, const Tensor&, int64_t, const Tensor&,
                                    const Tensor&, const Tensor&, bool, double, double,
                                    const OptionalTensor&);

template <typename Schema>
c10::TypedOperatorHandle<Schema> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Schema>();
}

struct Dispatched {
  static Three forward(const Tensor& q, const Tensor& k, const Tensor& v, const FusedCall& call) {
    static const auto op = find<ForwardSchema>("attn::_forward");
    return op.call(q, k, v, call.causal, call.dropout_p, call.scale,
                   optional(call.key_padding_mask), call.generator);
  }
  static Three backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out, const Tensor& lse, const Tensor& seed,
                        const FusedCall& call, const Wanted& wanted) {
    static const auto op = find<BackwardSchema>("attn::_backward");
    return op.call(grad, q, k, v, out, lse, seed, call.causal, call.dropout_p, call.scale,
                   optional(call.key_padding_mask), wanted);
  }
  static Three packed_forward(const Tensor& qkv, int64_t n_head, const FusedCall& call) {
    static const auto op = find<PackedForwardSchema>("attn::_packed_forward");
    return op.call(qkv, n_head, call.causal, call.dropout_p, call.scale,
                   optional(call.key_padding_mask), call.generator);
  }
  static Tensor packed_backward(const Tensor& grad, const Tensor& qkv, int64_t n_head,
                                const Tensor& out, const Tensor& lse, const Tensor& seed,
                                const FusedCall& call) {
    static const auto op = find<PackedBackwardSchema>("attn::_packed_backward");
    return op.call(grad, qkv, n_head, out, lse, seed, call.causal, call.dropout_p, call.scale,
                   optional(call.key_padding_mask));
  }
};

// ---- Second derivatives: the gradient once more, by the math, so that it carries a graph of its
// own

AttentionOptions math_options(const FusedCall& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      call.dropout_p == 0.0,
      "second derivatives of fused attention need dropout_p 0 (use Implementation::math), got ",
      call.dropout_p);
  return AttentionOptions()
      .causal(call.causal)
      .scale(call.scale)
      .key_padding_mask(call.key_padding_mask)
      .implementation(Implementation::math);
}

Tensor tracked(const Tensor& x) {
  return x.requires_grad() ? x : x.detach().requires_grad_();
}

variable_list math_backward(const Tensor& grad, const Tensor& q_, const Tensor& k_,
                            const Tensor& v_, const FusedCall& call) {
  const auto q = tracked(q_), k = tracked(k_), v = tracked(v_);
  const auto out = std::get<0>(math_attention(q, k, v, math_options(call)));
  return torch::autograd::grad({out}, {q, k, v}, {grad}, /*retain_graph=*/true,
                               /*create_graph=*/true);
}

Tensor packed_math_backward(const Tensor& grad, const Tensor& qkv_, int64_t n_head,
                            const FusedCall& call) {
  const auto qkv = tracked(qkv_);
  const auto [q, k, v] = unpack_heads(qkv, n_head);
  const auto out = merge_heads(std::get<0>(math_attention(q, k, v, math_options(call))));
  return torch::autograd::grad({out}, {qkv}, {grad}, /*retain_graph=*/true,
                               /*create_graph=*/true)[0];
}

// ---- First derivatives

void save(AutogradContext* context, const FusedCall& call) {
  context->saved_data["causal"] = call.causal;
  context->saved_data["dropout_p"] = call.dropout_p;
  context->saved_data["scale"] = call.scale;
}

FusedCall saved_call(AutogradContext* context, const Tensor& mask) {
  auto& data = context->saved_data;
  return {data["causal"].toBool(), data["dropout_p"].toDouble(), data["scale"].toDouble(), mask,
          std::nullopt};
}

template <class Kernels>
struct Attention : torch::autograd::Function<Attention<Kernels>> {
  static Tensor forward(AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v,
                        const FusedCall& call) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [out, lse, seed] = Kernels::forward(q, k, v, call);
    context->save_for_backward({q, k, v, out, lse, seed, call.key_padding_mask});
    save(context, call);
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto call = saved_call(context, saved[6]);
    variable_list result;
    if (at::GradMode::is_enabled()) {
      result = math_backward(grads[0], saved[0], saved[1], saved[2], call);
    } else {
      const Wanted wanted = {context->needs_input_grad(0), context->needs_input_grad(1),
                             context->needs_input_grad(2)};
      auto [dq, dk, dv] = Kernels::backward(grads[0], saved[0], saved[1], saved[2], saved[3],
                                            saved[4], saved[5], call, wanted);
      result = {dq, dk, dv};
      for (size_t i = 0; i < wanted.size(); ++i) {
        if (!wanted[i]) result[i] = Tensor();
      }
    }
    result.emplace_back();  // of `call`
    return result;
  }
};

template <class Kernels>
struct PackedAttention : torch::autograd::Function<PackedAttention<Kernels>> {
  static Tensor forward(AutogradContext* context, const Tensor& qkv, int64_t n_head,
                        const FusedCall& call) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [out, lse, seed] = Kernels::packed_forward(qkv, n_head, call);
    context->save_for_backward({qkv, out, lse, seed, call.key_padding_mask});
    context->saved_data["n_head"] = n_head;
    save(context, call);
    return out;
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const int64_t n_head = context->saved_data["n_head"].toInt();
    const auto call = saved_call(context, saved[4]);
    const auto result = at::GradMode::is_enabled()
                            ? packed_math_backward(grads[0], saved[0], n_head, call)
                            : Kernels::packed_backward(grads[0], saved[0], n_head, saved[1],
                                                       saved[2], saved[3], call);
    return {result, Tensor(), Tensor()};
  }
};

bool wants_gradient(const Tensor& x) {
  return at::GradMode::is_enabled() && x.requires_grad();
}

}  // namespace

Tensor fused_attention(const Tensor& q, const Tensor& k, const Tensor& v, const FusedCall& call) {
  if (wants_gradient(q) || wants_gradient(k) || wants_gradient(v))
    return Attention<Direct>::apply(q, k, v, call);
  return std::get<0>(fused_forward(q, k, v, call, /*want_logsumexp=*/false));
}

Tensor fused_packed_self_attention(const Tensor& qkv, int64_t n_head, const FusedCall& call) {
  if (wants_gradient(qkv)) return PackedAttention<Direct>::apply(qkv, n_head, call);
  return std::get<0>(fused_packed_forward(qkv, n_head, call, /*want_logsumexp=*/false));
}

Tensor dispatched_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                            const FusedCall& call) {
  return Attention<Dispatched>::apply(q, k, v, call);
}

Tensor dispatched_packed_self_attention(const Tensor& qkv, int64_t n_head, const FusedCall& call) {
  return PackedAttention<Dispatched>::apply(qkv, n_head, call);
}

namespace {

// ---- Kernels of the private operators

Three forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double dropout_p,
                  double scale, const OptionalTensor& mask, OptionalGenerator generator) {
  return fused_forward(q, k, v, fused_call(causal, dropout_p, scale, mask, std::move(generator)),
                       true);
}

Three forward_meta(const Tensor& q, const Tensor&, const Tensor&, bool, double dropout_p, double,
                   const OptionalTensor&, OptionalGenerator) {
  const auto B = q.sym_size(0), H = q.sym_size(1), T = q.sym_size(2), D = q.sym_size(3);
  return {at::empty_symint({B, T, H, D}, q.options()).transpose(1, 2),
          at::empty_symint({B, H, T}, q.options().dtype(at::kFloat)),
          at::empty({dropout_p > 0.0 ? 1 : 0}, q.options().dtype(at::kLong))};
}

Three backward_cpu(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& out, const Tensor& lse, const Tensor& seed, bool causal,
                   double dropout_p, double scale, const OptionalTensor& mask, Wanted wanted) {
  return fused_backward(grad, q, k, v, out, lse, seed, fused_call(causal, dropout_p, scale, mask),
                        wanted);
}

Three backward_meta(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&,
                    const Tensor&, const Tensor&, bool, double, double, const OptionalTensor&,
                    Wanted wanted) {
  const auto like = [](const Tensor& x, bool is_wanted) {
    if (!is_wanted) return at::empty({0, 0, 0, 0}, x.options());
    return at::empty_symint({x.sym_size(0), x.sym_size(2), x.sym_size(1), x.sym_size(3)},
                            x.options())
        .transpose(1, 2);
  };
  return {like(q, wanted[0]), like(k, wanted[1]), like(v, wanted[2])};
}

Three packed_forward_cpu(const Tensor& qkv, int64_t n_head, bool causal, double dropout_p,
                         double scale, const OptionalTensor& mask, OptionalGenerator generator) {
  auto [out, lse, seed] = fused_packed_forward(
      qkv, n_head, fused_call(causal, dropout_p, scale, mask, std::move(generator)), true);
  return {out, lse, seed.defined() ? seed : at::empty({0}, at::kLong)};
}

Three packed_forward_meta(const Tensor& qkv, int64_t n_head, bool, double dropout_p, double,
                          const OptionalTensor&, OptionalGenerator) {
  const auto B = qkv.sym_size(0), T = qkv.sym_size(1);
  return {at::empty_symint({B, T, qkv.sym_size(2) / 3}, qkv.options()),
          at::empty_symint({B, n_head, T}, qkv.options().dtype(at::kFloat)),
          at::empty({dropout_p > 0.0 ? 1 : 0}, qkv.options().dtype(at::kLong))};
}

Tensor packed_backward_cpu(const Tensor& grad, const Tensor& qkv, int64_t n_head, const Tensor& out,
                           const Tensor& lse, const Tensor& seed, bool causal, double dropout_p,
                           double scale, const OptionalTensor& mask) {
  return fused_packed_backward(grad, qkv, n_head, out, lse, seed,
                               fused_call(causal, dropout_p, scale, mask));
}

Tensor packed_backward_meta(const Tensor&, const Tensor& qkv, int64_t, const Tensor&, const Tensor&,
                            const Tensor&, bool, double, double, const OptionalTensor&) {
  return at::empty_symint({qkv.sym_size(0), qkv.sym_size(1), qkv.sym_size(2)}, qkv.options());
}

// Differentiable by the math when a derivative is wanted; without these, second derivatives would
// be silently wrong.
Three backward_autograd(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out, const Tensor& lse, const Tensor& seed, bool causal,
                        double dropout_p, double scale, const OptionalTensor& mask, Wanted wanted) {
  const auto call = fused_call(causal, dropout_p, scale, mask);
  if (wants_gradient(grad) || wants_gradient(q) || wants_gradient(k) || wants_gradient(v)) {
    const auto result = math_backward(grad, q, k, v, call);
    return {result[0], result[1], result[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return Dispatched::backward(grad, q, k, v, out, lse, seed, call, wanted);
}

Tensor packed_backward_autograd(const Tensor& grad, const Tensor& qkv, int64_t n_head,
                                const Tensor& out, const Tensor& lse, const Tensor& seed,
                                bool causal, double dropout_p, double scale,
                                const OptionalTensor& mask) {
  const auto call = fused_call(causal, dropout_p, scale, mask);
  if (wants_gradient(grad) || wants_gradient(qkv))
    return packed_math_backward(grad, qkv, n_head, call);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return Dispatched::packed_backward(grad, qkv, n_head, out, lse, seed, call);
}

// ---- The public operators

AttentionOptions options(bool causal, double dropout_p, std::optional<double> scale,
                         const OptionalTensor& mask, OptionalGenerator generator) {
  return AttentionOptions()
      .causal(causal)
      .dropout_p(dropout_p)
      .scale(scale)
      .key_padding_mask(mask.value_or(Tensor()))
      .generator(std::move(generator));
}

// While a graph with unknown sizes is traced there is nothing to check; the fused kernels'
// operators take it.
bool is_symbolic(const Tensor& x) {
  return x.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

double scale_of(std::optional<double> scale, const c10::SymInt& width, int64_t parts) {
  return scale ? *scale
               : 1.0 / std::sqrt(static_cast<double>(width.guard_int(__FILE__, __LINE__) / parts));
}

Tensor attention_operator(const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
                          double dropout_p, std::optional<double> scale, const OptionalTensor& mask,
                          OptionalGenerator generator) {
  if (is_symbolic(q) && fused_cpu_obstacle(q).empty()) {
    return dispatched_attention(q, k, v,
                                fused_call(causal, dropout_p, scale_of(scale, q.sym_size(3), 1),
                                           mask, std::move(generator)));
  }
  return attention(q, k, v, options(causal, dropout_p, scale, mask, std::move(generator)));
}

Tensor packed_operator(const Tensor& qkv, int64_t n_head, bool causal, double dropout_p,
                       std::optional<double> scale, const OptionalTensor& mask,
                       OptionalGenerator generator) {
  if (is_symbolic(qkv) && fused_cpu_obstacle(qkv).empty()) {
    return dispatched_packed_self_attention(
        qkv, n_head,
        fused_call(causal, dropout_p, scale_of(scale, qkv.sym_size(2), 3 * n_head), mask,
                   std::move(generator)));
  }
  return packed_self_attention(qkv, n_head,
                               options(causal, dropout_p, scale, mask, std::move(generator)));
}

}  // namespace

TORCH_LIBRARY(attn, m) {
  const std::vector<at::Tag> random = {at::Tag::nondeterministic_seeded};
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, *, bool causal=True, float dropout_p=0., float? "
      "scale=None, Tensor? key_padding_mask=None, "
      "Generator? generator=None) -> Tensor",
      random);
  m.def(
      "packed_self_attention(Tensor qkv, int n_head, *, bool causal=True, float dropout_p=0., "
      "float? scale=None, "
      "Tensor? key_padding_mask=None, Generator? generator=None) -> Tensor",
      random);
  m.def(
      "_forward(Tensor q, Tensor k, Tensor v, bool causal, float dropout_p, float scale, Tensor? "
      "key_padding_mask, Generator? generator) "
      "-> (Tensor, Tensor, Tensor)",
      random);
  m.def(
      "_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
      "Tensor seed, bool causal, float dropout_p, "
      "float scale, Tensor? key_padding_mask, bool[3] wanted) -> (Tensor, Tensor, Tensor)");
  m.def(
      "_packed_forward(Tensor qkv, int n_head, bool causal, float dropout_p, float scale, Tensor? "
      "key_padding_mask, Generator? generator) "
      "-> (Tensor, Tensor, Tensor)",
      random);
  m.def(
      "_packed_backward(Tensor grad_out, Tensor qkv, int n_head, Tensor out, Tensor logsumexp, "
      "Tensor seed, bool causal, float dropout_p, "
      "float scale, Tensor? key_padding_mask) -> Tensor");
  m.impl("attention", c10::DispatchKey::CompositeImplicitAutograd, attention_operator);
  m.impl("packed_self_attention", c10::DispatchKey::CompositeImplicitAutograd, packed_operator);
}

TORCH_LIBRARY_IMPL(attn, CPU, m) {
  m.impl("_forward", forward_cpu);
  m.impl("_backward", backward_cpu);
  m.impl("_packed_forward", packed_forward_cpu);
  m.impl("_packed_backward", packed_backward_cpu);
}

TORCH_LIBRARY_IMPL(attn, Meta, m) {
  m.impl("_forward", forward_meta);
  m.impl("_backward", backward_meta);
  m.impl("_packed_forward", packed_forward_meta);
  m.impl("_packed_backward", packed_backward_meta);
}

TORCH_LIBRARY_IMPL(attn, Autograd, m) {
  m.impl("_backward", backward_autograd);
  m.impl("_packed_backward", packed_backward_autograd);
}

TORCH_LIBRARY_IMPL(attn, AutocastCPU, m) {
  m.impl("attention", attention_operator);  // they cast by themselves
  m.impl("packed_self_attention", packed_operator);
}

}  // namespace attn::functional

/// Refers to this file, so that a program that links attn statically keeps the registrations above.
extern "C" ATTN_API void attn_register_operators() {}
