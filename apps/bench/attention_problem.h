#pragma once

#include "attention_modes.h"
#include "probes.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace bench {

struct AttentionShape {
  int64_t B, T, H, D;

  int64_t C() const { return H * D; }
  std::string name() const;  ///< "1,64,12,64"
};

/// A packed projection [B, T, 3C] as three views [B, H, T, D] without a copy.
struct Heads {
  at::Tensor q, k, v;
};
Heads heads_of(const at::Tensor& qkv, const AttentionShape& shape);

/// One set of arguments.
struct AttentionInput {
  at::Tensor qkv;         ///< [B, T, 3C]; a leaf that requires gradients, with `backward`
  Heads heads;            ///< of qkv; only without `backward`, where the graph has to hold them
  at::Tensor grad;        ///< [B, T, C], of the output
  at::Tensor grad_heads;  ///< the same as [B, H, T, D], a view
};

/// A row of `attn_bench attention`: what every side gets.
struct AttentionProblem {
  AttentionShape shape;
  AttentionMode mode;
  std::vector<AttentionInput> inputs;  ///< random; taken in turn
  at::Tensor padding;                  ///< [B, T] bool, true = padding; or undefined
  at::Tensor bias;  ///< [B, 1, 1, T], -inf at padding: scaled_dot_product_attention's fastest mask

  /// Pairs of a query and a key that it sees, over the batch.
  double pairs() const;
  Work forward_work() const;   ///< two products, one exponential a pair
  Work backward_work() const;  ///< five products, and the exponential again
};

AttentionProblem make_problem(const AttentionShape& shape, const AttentionMode& mode);

}  // namespace bench
