#include "attn/functional.h"

#include "checks.h"
#include "fused_attention.h"
#include "math_attention.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <string>

namespace attn::functional {
namespace {

void check_options(const AttentionOptions& options, int64_t B, int64_t S, const Tensor& q) {
  check_probability("dropout_p", options.dropout_p());
  TORCH_CHECK_VALUE(!options.scale() || std::isfinite(*options.scale()),
                    "scale must be finite, got ", options.scale().value_or(0.0));
  const auto& mask = options.key_padding_mask();
  if (!mask.defined()) return;
  TORCH_CHECK_VALUE(mask.scalar_type() == at::kBool, "key_padding_mask must be bool, got ",
                    mask.scalar_type());
  TORCH_CHECK_VALUE(mask.dim() == 2 && mask.size(0) == B && mask.size(1) == S,
                    "key_padding_mask must be [B, S] ([", B, ", ", S, "]), got shape ",
                    mask.sizes());
  TORCH_CHECK_VALUE(mask.device() == q.device(), "key_padding_mask must be on the input's device (",
                    q.device(), "), got ", mask.device());
}

void check_heads(const Tensor& x, const char* name) {
  TORCH_CHECK_VALUE(x.defined(), name, " must be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(x.dim() == 4, name, " must be 4-D [B, H, T, D], got shape ", x.sizes());
  TORCH_CHECK_VALUE(x.is_floating_point(), name, " must be floating-point, got ", x.scalar_type());
}

void check_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionOptions& options) {
  check_heads(q, "q");
  check_heads(k, "k");
  check_heads(v, "v");
  for (const auto* other : {&k, &v}) {
    const char* name = other == &k ? "k" : "v";
    TORCH_CHECK_VALUE(other->scalar_type() == q.scalar_type(), name, " must have q's dtype (",
                      q.scalar_type(), "), got ", other->scalar_type());
    TORCH_CHECK_VALUE(other->device() == q.device(), name, " must be on q's device (", q.device(),
                      "), got ", other->device());
  }
  TORCH_CHECK_VALUE(k.sizes() == v.sizes(), "v must have k's shape (", k.sizes(), "), got shape ",
                    v.sizes());
  TORCH_CHECK_VALUE(k.size(0) == q.size(0) && k.size(3) == q.size(3),
                    "k must have q's batch size and head width (", q.size(0), " and ", q.size(3),
                    "), got shape ", k.sizes());
  TORCH_CHECK_VALUE(q.size(3) >= 1, "the head width must be at least 1, got ", q.size(3));
  TORCH_CHECK_VALUE(q.size(1) >= 1 && k.size(1) >= 1, "q and k must have at least 1 head, got ",
                    q.size(1), " and ", k.size(1));
  check_multiple("q's number of heads", q.size(1), "k's", k.size(1));
  check_options(options, q.size(0), k.size(2), q);
}

void check_packed(const Tensor& qkv, int64_t n_head, const AttentionOptions& options) {
  TORCH_CHECK_VALUE(qkv.defined(), "qkv must be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(qkv.dim() == 3, "qkv must be 3-D [B, T, 3C], got shape ", qkv.sizes());
  TORCH_CHECK_VALUE(qkv.is_floating_point(), "qkv must be floating-point, got ", qkv.scalar_type());
  check_positive("n_head", n_head);
  TORCH_CHECK_VALUE(qkv.size(2) >= 1 && qkv.size(2) % (3 * n_head) == 0,
                    "the width of qkv must be a multiple of 3 * n_head (", 3 * n_head, "), got ",
                    qkv.size(2));
  check_options(options, qkv.size(0), qkv.size(1), qkv);
}

// LibTorch's CUDA kernels: why they can't be asked, or an empty string.
std::string sdpa_obstacle(const Tensor& x, int64_t heads) {
  if (!x.is_cuda()) return "a tensor on " + x.device().str();
  if (x.numel() == 0) return "a tensor without elements";
  if (heads > 65535) return "more than 65535 heads in all on CUDA";
  return "";
}

// The code that runs for these options, or an error that says why the one that is asked for can't.
enum class Path { kernels, sdpa, math };

Path choose(const Tensor& x, int64_t heads, const AttentionOptions& options) {
  if (options.implementation() == Implementation::math) return Path::math;
  const auto obstacle = x.is_cuda() ? sdpa_obstacle(x, heads) : fused_cpu_obstacle(x);
  if (obstacle.empty()) return x.is_cuda() ? Path::sdpa : Path::kernels;
  TORCH_CHECK_VALUE(options.implementation() == Implementation::automatic,
                    "Implementation::fused must not be asked for ", obstacle, ", got shape ",
                    x.sizes());
  return Path::math;
}

// Under autocast the fused operation computes in its dtype, as LibTorch's attention does; the
// math's operations are cast one by one.
bool casts(const Tensor& x, const AttentionOptions& options) {
  return options.implementation() != Implementation::math && x.is_cpu() &&
         at::autocast::is_autocast_enabled(at::kCPU) && x.scalar_type() == at::kFloat;
}

Tensor autocast(const Tensor& x) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCPU), x, at::kCPU);
}

using NoAutocast = c10::impl::ExcludeDispatchKeyGuard;

FusedCall fused_call(const AttentionOptions& options, int64_t D) {
  return {options.causal(), options.dropout_p(),
          options.scale().value_or(1.0 / std::sqrt(static_cast<double>(D))),
          options.key_padding_mask(), options.generator()};
}

}  // namespace

Tensor split_heads(const Tensor& x, int64_t n_head) {
  TORCH_CHECK_VALUE(x.defined() && x.dim() == 3, "x must be 3-D [B, T, C], got shape ",
                    x.defined() ? x.sizes() : at::IntArrayRef());
  check_positive("n_head", n_head);
  check_multiple("the width of x", x.size(2), "n_head", n_head);
  return x.unflatten(2, {n_head, x.size(2) / n_head}).transpose(1, 2);
}

Tensor merge_heads(const Tensor& x) {
  TORCH_CHECK_VALUE(x.defined() && x.dim() == 4, "x must be 4-D [B, H, T, D], got shape ",
                    x.defined() ? x.sizes() : at::IntArrayRef());
  return x.transpose(1, 2).flatten(2);
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options) {
  check_attention(q, k, v, options);
  if (casts(q, options)) {
    const NoAutocast guard(c10::DispatchKey::AutocastCPU);
    return attention(autocast(q), autocast(k), autocast(v), options);
  }
  switch (choose(q, q.size(0) * q.size(1), options)) {
    case Path::kernels: {
      const bool plain = is_plain_cpu(q) && is_plain_cpu(k) && is_plain_cpu(v);
      return (plain ? fused_attention : dispatched_attention)(q, k, v,
                                                              fused_call(options, q.size(3)));
    }
    case Path::sdpa:
      return sdpa_attention(q, k, v, options);
    case Path::math:
      break;
  }
  return std::get<0>(math_attention(q, k, v, options));
}

std::tuple<Tensor, Tensor> attention_with_weights(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const AttentionOptions& options) {
  check_attention(q, k, v, options);
  return math_attention(q, k, v, options);
}

Tensor packed_self_attention(const Tensor& qkv, int64_t n_head, const AttentionOptions& options) {
  check_packed(qkv, n_head, options);
  if (casts(qkv, options)) {
    const NoAutocast guard(c10::DispatchKey::AutocastCPU);
    return packed_self_attention(autocast(qkv), n_head, options);
  }
  const auto path = choose(qkv, qkv.size(0) * n_head, options);
  if (path == Path::kernels) {
    return (is_plain_cpu(qkv) ? fused_packed_self_attention : dispatched_packed_self_attention)(
        qkv, n_head, fused_call(options, qkv.size(2) / (3 * n_head)));
  }
  const auto [q, k, v] = unpack_heads(qkv, n_head);  // [B, H, T, D]
  const auto out = path == Path::sdpa ? sdpa_attention(q, k, v, options)
                                      : std::get<0>(math_attention(q, k, v, options));
  return merge_heads(out);  // [B, T, C]
}

std::tuple<Tensor, Tensor> packed_self_attention_with_weights(const Tensor& qkv, int64_t n_head,
                                                              const AttentionOptions& options) {
  check_packed(qkv, n_head, options);
  const auto [q, k, v] = unpack_heads(qkv, n_head);              // [B, H, T, D]
  const auto [out, weights] = math_attention(q, k, v, options);  // + [B, H, T, T]
  return {merge_heads(out), weights};
}

std::string fused_obstacle(const Tensor& x) {
  return x.is_cuda() ? sdpa_obstacle(x, x.dim() == 4 ? x.size(0) * x.size(1) : x.size(0))
                     : fused_cpu_obstacle(x);
}

}  // namespace attn::functional
