#pragma once

// Attention problems to compare implementations on.

#include <attn/functional.h>

#include <ATen/Functions.h>
#include <torch/types.h>

#include <sstream>
#include <string>
#include <vector>

namespace attn::testing {

struct AttentionProblem {
  torch::Tensor q;  // [B, H, T, D]
  torch::Tensor k;  // [B, Hkv, S, D]
  torch::Tensor v;  // [B, Hkv, S, D]
  functional::AttentionOptions options;

  std::string describe() const {
    std::ostringstream out;
    out << "q " << q.sizes() << ", k " << k.sizes() << (options.causal() ? ", causal" : "")
        << (options.key_padding_mask().defined() ? ", padded" : "");
    return out.str();
  }
};

inline int64_t random_int(int64_t low, int64_t high) {  // both included
  return torch::randint(low, high + 1, {1}).item<int64_t>();
}

inline AttentionProblem random_problem(int64_t B, int64_t H, int64_t Hkv, int64_t T, int64_t S,
                                       int64_t D, bool causal, bool padded, torch::Dtype dtype) {
  AttentionProblem problem{
      torch::randn({B, H, T, D}).to(dtype), torch::randn({B, Hkv, S, D}).to(dtype),
      torch::randn({B, Hkv, S, D}).to(dtype), functional::AttentionOptions().causal(causal)};
  if (padded) {
    auto mask = torch::rand({B, S}) < 0.4;
    mask[0].narrow(0, 0, S / 2 + 1).fill_(true);  // the first queries of a causal row see nothing
    problem.options.key_padding_mask(mask);
  }
  return problem;
}

/// Small ones of every kind, and a few that are longer than the tiles of any kernel.
inline std::vector<AttentionProblem> random_problems(torch::Dtype dtype, int64_t count = 24) {
  torch::manual_seed(20);
  std::vector<AttentionProblem> problems;
  for (const bool causal : {true, false}) {
    for (const bool padded : {true, false}) {
      const auto add = [&](int64_t B, int64_t H, int64_t Hkv, int64_t T, int64_t S, int64_t D) {
        problems.push_back(random_problem(B, H, Hkv, T, S, D, causal, padded, dtype));
      };
      for (int64_t i = 0; i < count; ++i) {
        const int64_t Hkv = random_int(1, 3);
        const int64_t T = random_int(1, 9);
        const int64_t S = i % 3 == 0 ? T : random_int(1, 12);
        add(random_int(1, 3), Hkv * random_int(1, 3), Hkv, T, S, random_int(1, 20));
      }
      add(1, 2, 1, 70, 70, 33);
      add(2, 1, 1, 37, 530, 16);
      add(1, 2, 2, 130, 65, 8);
      add(1, 2, 1, 1, 300, 64);
    }
  }
  return problems;
}

}  // namespace attn::testing
