#include "attn/functional.h"

#include "checks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

namespace attn::functional {
namespace {

constexpr double kNegativeInfinity = -std::numeric_limits<double>::infinity();

// Which keys which queries must not see. Broadcasts to [B, H, T, S]; undefined = every key is seen.
struct Mask {
  Tensor blocked;  // bool; a row with every key blocked is opened here and listed in `blind`
  Tensor blind;    // bool, [..., T, 1]: queries that may see no key; undefined = there are none
};

Mask build_mask(int64_t T, int64_t S, const Tensor& key_padding_mask, bool causal,
                const Tensor& like) {
  Mask mask;
  if (causal && T > 1) {
    // Bottom-right aligned: query i sees keys 0 .. S - T + i.
    mask.blocked = at::ones({T, S}, like.options().dtype(at::kBool)).triu(S - T + 1);  // [T, S]
  }
  if (key_padding_mask.defined()) {
    const auto padding = key_padding_mask.unsqueeze(1).unsqueeze(2);  // [B, 1, 1, S]
    mask.blocked = mask.blocked.defined() ? mask.blocked | padding : padding;
  }
  // Softmax over nothing is NaN, and its gradient stays NaN behind a later zero: so a blind row
  // sees everything, and what comes out of it is replaced by zeros.
  if (mask.blocked.defined() && (key_padding_mask.defined() || S < T)) {
    mask.blind = mask.blocked.all(-1, /*keepdim=*/true);
    mask.blocked = mask.blocked & ~mask.blind;
  }
  return mask;
}

double score_scale(const Tensor& q, const AttentionOptions& options) {
  return options.scale().value_or(1.0 / std::sqrt(static_cast<double>(q.size(-1))));
}

// [B, Hkv, S, D] -> [B, H, S, D]: each key head serves H / Hkv query heads in a row.
Tensor repeat_heads(const Tensor& x, int64_t n_head) {
  const int64_t group = n_head / x.size(1);
  if (group == 1) return x;
  return x.unsqueeze(2).expand({-1, -1, group, -1, -1}).flatten(1, 2);
}

std::tuple<Tensor, Tensor> math_attention(const Tensor& q, const Tensor& key, const Tensor& value,
                                          const AttentionOptions& options) {
  const auto k = repeat_heads(key, q.size(1));    // [B, H, S, D]
  const auto v = repeat_heads(value, q.size(1));  // [B, H, S, D]
  const auto mask =
      build_mask(q.size(2), k.size(2), options.key_padding_mask(), options.causal(), q);
  const double scale = score_scale(q, options);

  // float16 overflows at 65504, which q · k reaches before the scale makes it small; elsewhere the
  // order is the seeds'.
  const auto scores = q.scalar_type() == at::kHalf
                          ? at::matmul(q * scale, k.transpose(-2, -1))
                          : at::matmul(q, k.transpose(-2, -1)) * scale;  // [B, H, T, S]
  const auto masked =
      mask.blocked.defined() ? scores.masked_fill(mask.blocked, kNegativeInfinity) : scores;
  auto weights = at::softmax(masked, -1);  // [B, H, T, S]
  if (mask.blind.defined()) weights = weights.masked_fill(mask.blind, 0.0);
  if (options.dropout_p() > 0.0)
    weights = at::dropout(weights, options.dropout_p(), /*train=*/true);
  return {at::matmul(weights, v), weights};  // [B, H, T, D]
}

Tensor fused_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                       const AttentionOptions& options) {
  const int64_t T = q.size(2);
  const int64_t S = k.size(2);
  const bool grouped = q.size(1) != k.size(1);
  const double scale = score_scale(q, options);

  // LibTorch's is_causal is aligned at the first token, so it serves T == S only; and it excludes a
  // mask.
  const bool is_causal = options.causal() && T == S && !options.key_padding_mask().defined();
  const auto mask = build_mask(T, S, options.key_padding_mask(), options.causal() && !is_causal, q);
  std::optional<Tensor> seen;
  if (mask.blocked.defined()) seen = ~mask.blocked;
  const auto out = at::scaled_dot_product_attention(q, k, v, seen, options.dropout_p(), is_causal,
                                                    scale, grouped);  // [B, H, T, D]
  return mask.blind.defined() ? out.masked_fill(mask.blind, 0.0) : out;
}

// Why LibTorch's fused kernels can't be asked, or nullptr.
const char* fused_obstacle(const Tensor& q, const Tensor& k) {
  if (q.numel() == 0 || k.numel() == 0) return "a tensor without elements";
  if (q.is_cuda() && q.size(0) * q.size(1) > 65535) return "more than 65535 heads in all on CUDA";
  return nullptr;
}

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

// The three thirds of a packed projection as heads: views [B, H, T, D], nothing is copied.
std::tuple<Tensor, Tensor, Tensor> unpack(const Tensor& qkv, int64_t n_head) {
  TORCH_CHECK_VALUE(qkv.defined(), "qkv must be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(qkv.dim() == 3, "qkv must be 3-D [B, T, 3C], got shape ", qkv.sizes());
  check_positive("n_head", n_head);
  TORCH_CHECK_VALUE(qkv.size(2) >= 1 && qkv.size(2) % (3 * n_head) == 0,
                    "the width of qkv must be a multiple of 3 * n_head (", 3 * n_head, "), got ",
                    qkv.size(2));
  const auto parts =
      qkv.unflatten(2, {3, n_head, -1}).permute({2, 0, 3, 1, 4}).unbind(0);  // 3 x [B, H, T, D]
  return {parts[0], parts[1], parts[2]};
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
  const char* obstacle = fused_obstacle(q, k);
  TORCH_CHECK_VALUE(options.implementation() != Implementation::fused || obstacle == nullptr,
                    "Implementation::fused must not be asked for ", obstacle ? obstacle : "",
                    ", got q of shape ", q.sizes());
  if (options.implementation() == Implementation::math || obstacle != nullptr) {
    return std::get<0>(math_attention(q, k, v, options));
  }
  return fused_attention(q, k, v, options);
}

std::tuple<Tensor, Tensor> attention_with_weights(const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const AttentionOptions& options) {
  check_attention(q, k, v, options);
  return math_attention(q, k, v, options);
}

Tensor packed_self_attention(const Tensor& qkv, int64_t n_head, const AttentionOptions& options) {
  const auto [q, k, v] = unpack(qkv, n_head);       // [B, H, T, D]
  return merge_heads(attention(q, k, v, options));  // [B, T, C]
}

std::tuple<Tensor, Tensor> packed_self_attention_with_weights(const Tensor& qkv, int64_t n_head,
                                                              const AttentionOptions& options) {
  const auto [q, k, v] = unpack(qkv, n_head);                            // [B, H, T, D]
  const auto [out, weights] = attention_with_weights(q, k, v, options);  // + [B, H, T, T]
  return {merge_heads(out), weights};
}

}  // namespace attn::functional
