#include "attn/modules/embedding.h"

#include "checks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <torch/nn/init.h>

#include <cmath>

namespace attn {

TokenEmbeddingImpl::TokenEmbeddingImpl(const TokenEmbeddingOptions& options_) : options(options_) {
  check_positive("vocab_size", options.vocab_size());
  check_positive("d_model", options.d_model());
  reset();
}

void TokenEmbeddingImpl::reset() {
  embedding =
      register_module("embedding", torch::nn::Embedding(options.vocab_size(), options.d_model()));
  torch::nn::init::normal_(embedding->weight, 0.0, 0.02);
}

void TokenEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::TokenEmbedding(vocab_size=" << options.vocab_size()
         << ", d_model=" << options.d_model() << ")";
}

Tensor TokenEmbeddingImpl::forward(const Tensor& ids) {
  check_token_ids(ids, options.vocab_size());
  return embedding(ids);  // ids' shape + [C]
}

SinusoidalPositionalEmbeddingImpl::SinusoidalPositionalEmbeddingImpl(
    const SinusoidalPositionalEmbeddingOptions& options_)
    : options(options_) {
  check_positive("max_context_length", options.max_context_length());
  check_positive("d_model", options.d_model());
  TORCH_CHECK_VALUE(options.d_model() % 2 == 0, "d_model must be even, got ", options.d_model());
  TORCH_CHECK_VALUE(std::isfinite(options.base()) && options.base() > 0.0,
                    "base must be positive and finite, got ", options.base());
  reset();
}

void SinusoidalPositionalEmbeddingImpl::reset() {
  build(torch::kCPU, torch::kFloat32);
}

void SinusoidalPositionalEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "attn::SinusoidalPositionalEmbedding(max_context_length="
         << options.max_context_length() << ", d_model=" << options.d_model()
         << ", base=" << options.base() << ")";
}

// In float32 on the CPU whatever is asked for, as Python computes it, then converted.
void SinusoidalPositionalEmbeddingImpl::build(torch::Device device, torch::Dtype dtype) {
  const int64_t C = options.d_model();
  const auto position =
      at::arange(options.max_context_length(), at::kFloat).unsqueeze(1);           // [L, 1]
  const auto exponent = at::arange(0, C, 2, at::kFloat) / static_cast<double>(C);  // [C / 2]
  const auto angle = position / at::pow(options.base(), exponent);                 // [L, C / 2]
  pe = at::stack({angle.sin(), angle.cos()}, -1).flatten(1).to(device, dtype);     // [L, C]
}

std::shared_ptr<torch::nn::Module> SinusoidalPositionalEmbeddingImpl::clone(
    const std::optional<torch::Device>& device) const {
  auto copy = Cloneable::clone(device);
  copy->to(device.value_or(pe.device()), pe.scalar_type());
  return copy;
}

void SinusoidalPositionalEmbeddingImpl::to(torch::Device device, torch::Dtype dtype,
                                           bool non_blocking) {
  Cloneable::to(device, dtype, non_blocking);
  build(device, dtype);
}

void SinusoidalPositionalEmbeddingImpl::to(torch::Dtype dtype, bool non_blocking) {
  Cloneable::to(dtype, non_blocking);
  build(pe.device(), dtype);
}

void SinusoidalPositionalEmbeddingImpl::to(torch::Device device, bool non_blocking) {
  Cloneable::to(device, non_blocking);
  build(device, pe.scalar_type());
}

Tensor SinusoidalPositionalEmbeddingImpl::forward(int64_t seq_len, int64_t offset) {
  check_positive("seq_len", seq_len);
  TORCH_CHECK_VALUE(offset >= 0, "offset must be at least 0, got ", offset);
  TORCH_CHECK_VALUE(seq_len <= options.max_context_length() - offset,
                    "offset + seq_len must be at most max_context_length (",
                    options.max_context_length(), "), got ", offset, " + ", seq_len);
  return pe.narrow(0, offset, seq_len);  // [seq_len, C]
}

}  // namespace attn
