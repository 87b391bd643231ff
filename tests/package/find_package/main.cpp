#include <attn/attn.h>

#include <ATen/ops/randn.h>

#include <iostream>

int main() {
  attn::SelfAttention attention(/*n_embd=*/8, /*n_head=*/2);
  auto [y, weights] =
      attention->forward_with_weights(at::randn({1, 4, 8}));  // [1, 4, 8], [1, 2, 4, 4]
  // The first token sees itself only.
  const bool causal =
      weights[0][0][0][0].item<float>() == 1.0F && weights[0][1][0][3].item<float>() == 0.0F;
  std::cout << "attn " << attn::version() << ": " << y.sizes() << ", causal: " << causal << '\n';
  return causal && y.sizes() == at::IntArrayRef({1, 4, 8}) ? 0 : 1;
}
