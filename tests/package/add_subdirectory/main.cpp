#include <attn/modules/multi_head_self_attention.h>

#include <ATen/ops/randn.h>

#include <iostream>

int main() {
  attn::MultiHeadSelfAttention attention(/*d_model=*/16, /*n_heads=*/4, /*max_context_length=*/5);
  auto [y, weights] =
      attention->forward_with_weights(at::randn({2, 5, 16}));  // [2, 5, 16], [2, 4, 5, 5]
  // Each row of weights sums to 1.
  const double error = (weights.sum(-1) - 1).abs().max().item<double>();
  std::cout << "out " << y.sizes() << ", weights " << weights.sizes() << ", rows sum to 1 within "
            << error << '\n';
  return error < 1e-6 && y.sizes() == at::IntArrayRef({2, 5, 16}) ? 0 : 1;
}
