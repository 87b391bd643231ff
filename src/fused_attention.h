#pragma once

// The fused CPU kernels as functions of tensors, and their derivative. Arguments are checked by the
// caller.

#include <attn/functional.h>

#include <ATen/core/Generator.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

namespace attn::functional {

/// What a fused call needs beside its tensors: AttentionOptions with the scale settled.
struct FusedCall {
  bool causal = true;
  double dropout_p = 0.0;
  double scale = 1.0;
  Tensor key_padding_mask;  ///< [B, S] bool, or undefined
  std::optional<at::Generator> generator;
};

/// Why the fused CPU kernels can't take tensors like x, or an empty string.
std::string fused_cpu_obstacle(const Tensor& x);

/// Whether x is an ordinary CPU tensor and nothing (autocast, functorch, a dispatch mode,
/// forward-mode derivatives) wants to see the call: then the dispatcher, 1 to 3 µs a call, can be
/// skipped.
bool is_plain_cpu(const Tensor& x);

/// (out [B, H, T, D] as a view of [B, T, H, D], log2 of the softmax's sums [B, H, T], seed of the
/// dropout [1] int64). The last two are without elements when not wanted.
std::tuple<Tensor, Tensor, Tensor> fused_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const FusedCall& call, bool want_logsumexp);
/// Gradients of q, k and v, in their shapes; without elements where not wanted.
std::tuple<Tensor, Tensor, Tensor> fused_backward(const Tensor& grad_out, const Tensor& q,
                                                  const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& logsumexp,
                                                  const Tensor& seed, const FusedCall& call,
                                                  const std::array<bool, 3>& wanted);

/// The same from and to a packed projection: qkv [B, T, 3C] -> (out [B, T, C], ...).
std::tuple<Tensor, Tensor, Tensor> fused_packed_forward(const Tensor& qkv, int64_t n_head,
                                                        const FusedCall& call, bool want_logsumexp);
Tensor fused_packed_backward(const Tensor& grad_out, const Tensor& qkv, int64_t n_head,
                             const Tensor& out, const Tensor& logsumexp, const Tensor& seed,
                             const FusedCall& call);

/// Weights of a self-attention module: [3C, C] and [C, C], biases [3C] and [C] or undefined.
struct ModuleWeights {
  const Tensor& qkv_weight;
  const Tensor& qkv_bias;
  const Tensor& proj_weight;
  const Tensor& proj_bias;
};

/// A small self-attention module in inference, x [B, T, C] -> [B, T, C], as one call: projection,
/// attention, output projection. Undefined where that can't be (a gradient is wanted, dropout,
/// another dtype or device, Implementation::math) or is not measured faster: the caller then takes
/// the three steps. LibTorch's linears alone take 2.5 to 20 us at the seeds' sizes.
Tensor small_module(const Tensor& x, const ModuleWeights& weights, int64_t n_head,
                    const AttentionOptions& options);

/// Differentiable, straight to the kernels: for tensors that are `is_plain_cpu`.
Tensor fused_attention(const Tensor& q, const Tensor& k, const Tensor& v, const FusedCall& call);
Tensor fused_packed_self_attention(const Tensor& qkv, int64_t n_head, const FusedCall& call);

/// Differentiable, through the dispatcher's operators: for every other tensor.
Tensor dispatched_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                            const FusedCall& call);
Tensor dispatched_packed_self_attention(const Tensor& qkv, int64_t n_head, const FusedCall& call);

}  // namespace attn::functional
