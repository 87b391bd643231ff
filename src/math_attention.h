#pragma once

// The seeds' formula in ATen operations: the truth that the fused kernels are tested against, and
// the path for what they do not do. Arguments are checked by the caller.

#include <attn/functional.h>

#include <tuple>

namespace attn::functional {

/// The factor of q kᵀ that the options ask for.
double score_scale(const Tensor& q, const AttentionOptions& options);

/// The three thirds of a packed projection as heads: views [B, H, T, D], nothing is copied.
std::tuple<Tensor, Tensor, Tensor> unpack_heads(const Tensor& qkv, int64_t n_head);

/// (out [B, H, T, D], weights [B, H, T, S]).
std::tuple<Tensor, Tensor> math_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                          const AttentionOptions& options);

/// LibTorch's scaled_dot_product_attention, for CUDA: [B, H, T, D].
Tensor sdpa_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                      const AttentionOptions& options);

}  // namespace attn::functional
