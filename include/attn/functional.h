#pragma once

#include <attn/export.h>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

namespace attn {

using at::Tensor;

/// Which code computes attention.
enum class Implementation {
  automatic,  ///< `fused` where it can run, `math` elsewhere
  math,       ///< the seeds' formula in ATen operations: every device and dtype
  /// One operation without a [T, S] tensor. On the CPU our own kernels, for float32 and bfloat16;
  /// on CUDA LibTorch's scaled_dot_product_attention. An error where it can't run;
  /// `functional::fused_obstacle` tells beforehand.
  fused,
};

}  // namespace attn

namespace attn::functional {

/// Options of the attention functions; each has a default.
///
/// @code
/// namespace F = attn::functional;
/// torch::Tensor qkv = torch::randn({1, 4, 3 * 8});  // [B, T, 3C]
/// auto options = F::AttentionOptions().causal(false);
/// torch::Tensor y = F::packed_self_attention(qkv, /*n_head=*/2, options);  // [B, T, C]
/// @endcode
struct ATTN_API AttentionOptions {
  /// Query i of T sees keys 0 .. S - T + i only (aligned at the last token, as a cache needs it).
  TORCH_ARG(bool, causal) = true;
  /// Probability that an attention weight is zeroed, in [0, 1]; the rest is scaled by 1 / (1 - p).
  /// Applied whenever it is not 0: pass 0 in evaluation.
  TORCH_ARG(double, dropout_p) = 0.0;
  /// Factor of q kᵀ; 1 / sqrt(D) when not given.
  TORCH_ARG(std::optional<double>, scale) = std::nullopt;
  /// [B, S] bool, true = padding that no query sees (PyTorch's meaning); undefined = none.
  TORCH_ARG(Tensor, key_padding_mask);
  TORCH_ARG(Implementation, implementation) = Implementation::automatic;
  /// Draws the dropout; the default generator of the device when not given.
  TORCH_ARG(std::optional<at::Generator>, generator) = std::nullopt;
};

/// Why `Implementation::fused` can't run on tensors like x (q, or a packed qkv), or an empty
/// string.
ATTN_API std::string fused_obstacle(const Tensor& x);

/// Splits the width into heads: [B, T, C] -> [B, H, T, D], a view where the strides allow.
/// Seed 2: `x.view(b, t, n_heads, d_head).transpose(1, 2)`.
/// @throws c10::ValueError if x is not 3-D, or C is not a multiple of n_head.
ATTN_API Tensor split_heads(const Tensor& x, int64_t n_head);

/// Joins the heads again: [B, H, T, D] -> [B, T, C].
/// Seed 2: `x.transpose(1, 2).contiguous().view(b, t, h * dh)`.
/// @throws c10::ValueError if x is not 4-D.
ATTN_API Tensor merge_heads(const Tensor& x);

/// Scaled dot-product attention, softmax(scale · q kᵀ) v (Vaswani et al. 2017, equation 1).
///
/// q [B, H, T, D], k and v [B, Hkv, S, D] -> [B, H, T, D] in q's dtype. H is a multiple of Hkv:
/// each key head then serves H / Hkv query heads in a row. A query that may see no key gives zeros
/// and zero gradients, never NaN. Any strides.
///
/// NaN and infinities: with the fused CPU kernels, what a query may not see does not reach it. The
/// math follows PyTorch: masked scores are replaced, so a masked *key* changes nothing, but a
/// masked *value* still meets its zero weight, and 0 · NaN is NaN. On CUDA it is as LibTorch's
/// kernel has it.
///
/// Dropout of the fused CPU kernels: one draw of the generator, then Philox4x32-10 (Salmon et al.
/// 2011) by position: a seed drops the same weights on every thread count and instruction set. They
/// are other weights than the math drops.
///
/// Second derivatives go through the math; with dropout only `Implementation::math` has them.
///
/// @throws c10::ValueError for shapes, dtypes, devices or options that do not fit; for
/// `Implementation::fused` where it can't run.
ATTN_API Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                          const AttentionOptions& options = {});

/// As `attention`, step by step as the seeds write it, and with the weights:
/// (output [B, H, T, D], weights [B, H, T, S]). Weights are per head and after dropout, as in
/// Python. Always the math, whatever `options.implementation()` says.
ATTN_API std::tuple<Tensor, Tensor> attention_with_weights(const Tensor& q, const Tensor& k,
                                                           const Tensor& v,
                                                           const AttentionOptions& options = {});

/// Self-attention from one packed projection: qkv [B, T, 3C], with q, k and v side by side, each
/// n_head heads of width D -> [B, T, C]. The heart of every module here.
/// @throws c10::ValueError as `attention`; if 3C is not a multiple of 3 · n_head.
ATTN_API Tensor packed_self_attention(const Tensor& qkv, int64_t n_head,
                                      const AttentionOptions& options = {});

/// As `packed_self_attention`, by the math: (output [B, T, C], weights [B, H, T, T]).
ATTN_API std::tuple<Tensor, Tensor> packed_self_attention_with_weights(
    const Tensor& qkv, int64_t n_head, const AttentionOptions& options = {});

}  // namespace attn::functional
