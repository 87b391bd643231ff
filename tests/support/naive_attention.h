#pragma once

// The naive twin: attention and its gradients by loops in double, straight from the definition.
// What every implementation is compared with.

#include <attn/functional.h>

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace attn::testing {

struct NaiveAttention {
  torch::Tensor out;      // [B, H, T, D] float64
  torch::Tensor weights;  // [B, H, T, S] float64
};

struct NaiveGradients {
  torch::Tensor q, k, v;  // the inputs' shapes, float64
};

namespace naive {

inline torch::Tensor wide(const torch::Tensor& x) {
  return x.detach().to(torch::kCPU, torch::kFloat64).contiguous();
}

/// Which keys the query t of batch row b sees: causal means keys 0 .. S - T + t.
inline std::vector<int64_t> seen_keys(const functional::AttentionOptions& options, int64_t b,
                                      int64_t t, int64_t T, int64_t S) {
  const auto mask = options.key_padding_mask().defined()
                        ? options.key_padding_mask().cpu().contiguous()
                        : torch::zeros({b + 1, S}, torch::kBool);
  const bool* padded = mask.const_data_ptr<bool>() + b * S;
  std::vector<int64_t> seen;
  for (int64_t s = 0; s < S; ++s) {
    const bool future = options.causal() && s > S - T + t;
    if (!future && !padded[s]) seen.push_back(s);
  }
  return seen;
}

inline double scale_of(const torch::Tensor& q, const functional::AttentionOptions& options) {
  return options.scale().value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
}

}  // namespace naive

/// q [B, H, T, D], k and v [B, Hkv, S, D]; no dropout. Queries that see no key give zeros.
inline NaiveAttention naive_attention(const torch::Tensor& q, const torch::Tensor& k,
                                      const torch::Tensor& v,
                                      const functional::AttentionOptions& options = {}) {
  const int64_t B = q.size(0), H = q.size(1), T = q.size(2), S = k.size(2), D = q.size(3);
  const int64_t group = H / k.size(1);  // query heads per key head
  const double scale = naive::scale_of(q, options);
  const auto out = torch::zeros({B, H, T, D}, torch::kFloat64);
  const auto weights = torch::zeros({B, H, T, S}, torch::kFloat64);
  const auto wide_q = naive::wide(q), wide_k = naive::wide(k), wide_v = naive::wide(v);
  const auto qs = wide_q.accessor<double, 4>(), ks = wide_k.accessor<double, 4>(),
             vs = wide_v.accessor<double, 4>();
  auto os = out.accessor<double, 4>(), ws = weights.accessor<double, 4>();

  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      const auto seen = naive::seen_keys(options, b, t, T, S);
      if (seen.empty()) continue;
      for (int64_t h = 0; h < H; ++h) {
        double greatest = -INFINITY;
        for (const auto s : seen) {
          double score = 0.0;
          for (int64_t d = 0; d < D; ++d) score += qs[b][h][t][d] * ks[b][h / group][s][d];
          ws[b][h][t][s] = score * scale;
          greatest = std::max(greatest, ws[b][h][t][s]);
        }
        double sum = 0.0;
        for (const auto s : seen) sum += ws[b][h][t][s] = std::exp(ws[b][h][t][s] - greatest);
        for (const auto s : seen) {
          ws[b][h][t][s] /= sum;
          for (int64_t d = 0; d < D; ++d) {
            os[b][h][t][d] += ws[b][h][t][s] * vs[b][h / group][s][d];
          }
        }
      }
    }
  }
  return {out, weights};
}

/// Gradients of sum(grad_out · naive_attention(q, k, v).out).
inline NaiveGradients naive_attention_backward(const torch::Tensor& grad_out,
                                               const torch::Tensor& q, const torch::Tensor& k,
                                               const torch::Tensor& v,
                                               const functional::AttentionOptions& options = {}) {
  const int64_t B = q.size(0), H = q.size(1), T = q.size(2), S = k.size(2), D = q.size(3);
  const int64_t group = H / k.size(1);
  const double scale = naive::scale_of(q, options);
  const NaiveGradients grad = {torch::zeros(q.sizes(), torch::kFloat64),
                               torch::zeros(k.sizes(), torch::kFloat64),
                               torch::zeros(v.sizes(), torch::kFloat64)};
  const auto weights = naive_attention(q, k, v, options).weights;
  const auto wide_grad = naive::wide(grad_out), wide_q = naive::wide(q), wide_k = naive::wide(k),
             wide_v = naive::wide(v);
  const auto gs = wide_grad.accessor<double, 4>(), qs = wide_q.accessor<double, 4>(),
             ks = wide_k.accessor<double, 4>(), vs = wide_v.accessor<double, 4>(),
             ws = weights.accessor<double, 4>();
  auto dq = grad.q.accessor<double, 4>(), dk = grad.k.accessor<double, 4>(),
       dv = grad.v.accessor<double, 4>();

  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      const int64_t kv = h / group;
      for (int64_t t = 0; t < T; ++t) {
        std::vector<double> dweights(static_cast<size_t>(S), 0.0);
        double mean = 0.0;  // of dweights under the weights: softmax's own derivative
        for (int64_t s = 0; s < S; ++s) {
          for (int64_t d = 0; d < D; ++d) {
            dweights[s] += gs[b][h][t][d] * vs[b][kv][s][d];
            dv[b][kv][s][d] += ws[b][h][t][s] * gs[b][h][t][d];
          }
          mean += ws[b][h][t][s] * dweights[s];
        }
        for (int64_t s = 0; s < S; ++s) {
          const double dscore = scale * ws[b][h][t][s] * (dweights[s] - mean);
          for (int64_t d = 0; d < D; ++d) {
            dq[b][h][t][d] += dscore * ks[b][kv][s][d];
            dk[b][kv][s][d] += dscore * qs[b][h][t][d];
          }
        }
      }
    }
  }
  return grad;
}

}  // namespace attn::testing
