#include "math_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>

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

// [B, Hkv, S, D] -> [B, H, S, D]: each key head serves H / Hkv query heads in a row.
Tensor repeat_heads(const Tensor& x, int64_t n_head) {
  const int64_t group = n_head / x.size(1);
  if (group == 1) return x;
  return x.unsqueeze(2).expand({-1, -1, group, -1, -1}).flatten(1, 2);
}

// Without a generator of its own it draws and computes as F.dropout does, bit for bit.
Tensor drop(const Tensor& weights, const AttentionOptions& options) {
  const double p = options.dropout_p();
  if (p == 0.0) return weights;
  if (!options.generator()) return at::dropout(weights, p, /*train=*/true);
  if (p == 1.0) return weights * 0.0;
  return weights * at::empty_like(weights).bernoulli_(1.0 - p, options.generator()).div_(1.0 - p);
}

}  // namespace

double score_scale(const Tensor& q, const AttentionOptions& options) {
  return options.scale().value_or(1.0 / std::sqrt(static_cast<double>(q.size(-1))));
}

std::tuple<Tensor, Tensor, Tensor> unpack_heads(const Tensor& qkv, int64_t n_head) {
  const auto parts =
      qkv.unflatten(2, {3, n_head, -1}).permute({2, 0, 3, 1, 4}).unbind(0);  // 3 x [B, H, T, D]
  return {parts[0], parts[1], parts[2]};
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
  weights = drop(weights, options);
  return {at::matmul(weights, v), weights};  // [B, H, T, D]
}

Tensor sdpa_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                      const AttentionOptions& options) {
  const int64_t T = q.size(2);
  const int64_t S = k.size(2);
  const bool grouped = q.size(1) != k.size(1);
  const double scale = score_scale(q, options);

  // LibTorch's is_causal is aligned at the first token, so it serves T == S only; it excludes a
  // mask; and its -inf is multiplied by the scale afterwards, so it serves positive ones only.
  const bool is_causal =
      options.causal() && T == S && scale > 0.0 && !options.key_padding_mask().defined();
  const auto mask = build_mask(T, S, options.key_padding_mask(), options.causal() && !is_causal, q);
  std::optional<Tensor> seen;
  if (mask.blocked.defined()) seen = ~mask.blocked;
  const auto out = at::scaled_dot_product_attention(q, k, v, seen, options.dropout_p(), is_causal,
                                                    scale, grouped);  // [B, H, T, D]
  return mask.blind.defined() ? out.masked_fill(mask.blind, 0.0) : out;
}

}  // namespace attn::functional
