#pragma once

#include <attn/export.h>
#include <attn/functional.h>
#include <attn/modules/cloneable.h>

#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

namespace attn {

/// Options of `TokenEmbedding`.
struct ATTN_API TokenEmbeddingOptions {
  TokenEmbeddingOptions(int64_t vocab_size, int64_t d_model)
      : vocab_size_(vocab_size), d_model_(d_model) {}

  TORCH_ARG(int64_t, vocab_size);  ///< V
  TORCH_ARG(int64_t, d_model);     ///< model width C
};

/// A table of V vectors of width C, drawn from N(0, 0.02) (seed 2).
class ATTN_API TokenEmbeddingImpl : public Cloneable<TokenEmbeddingImpl> {
 public:
  TokenEmbeddingImpl(int64_t vocab_size, int64_t d_model)
      : TokenEmbeddingImpl(TokenEmbeddingOptions(vocab_size, d_model)) {}
  /// @throws c10::ValueError if vocab_size or d_model is below 1.
  explicit TokenEmbeddingImpl(const TokenEmbeddingOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// ids [B, T] (any shape), int32 or int64, each in [0, V) -> ids' shape + [C].
  /// @throws c10::ValueError if ids are not integral or one is out of range (checked before any
  /// kernel runs; on CUDA that waits for the device).
  Tensor forward(const Tensor& ids);

  TokenEmbeddingOptions options;
  torch::nn::Embedding embedding{nullptr};  ///< [V, C]
};
TORCH_MODULE(TokenEmbedding);

/// Options of `SinusoidalPositionalEmbedding`.
struct ATTN_API SinusoidalPositionalEmbeddingOptions {
  SinusoidalPositionalEmbeddingOptions(int64_t max_context_length, int64_t d_model)
      : max_context_length_(max_context_length), d_model_(d_model) {}

  TORCH_ARG(int64_t, max_context_length);
  TORCH_ARG(int64_t, d_model);  ///< model width C, even
  TORCH_ARG(double, base) = 10000.0;
};

/// Fixed positions: pe[p, 2i] = sin(p / base^(2i/C)), pe[p, 2i+1] = cos of the same (seed 2;
/// Vaswani et al. 2017, section 3.5).
class ATTN_API SinusoidalPositionalEmbeddingImpl
    : public Cloneable<SinusoidalPositionalEmbeddingImpl> {
 public:
  SinusoidalPositionalEmbeddingImpl(int64_t max_context_length, int64_t d_model,
                                    double base = 10000.0)
      : SinusoidalPositionalEmbeddingImpl(
            SinusoidalPositionalEmbeddingOptions(max_context_length, d_model).base(base)) {}
  /// @throws c10::ValueError if a size is below 1, d_model is odd, or base is not positive and
  /// finite.
  explicit SinusoidalPositionalEmbeddingImpl(const SinusoidalPositionalEmbeddingOptions& options_);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;

  /// Rows offset .. offset + seq_len - 1 of the table -> [seq_len, C].
  /// @throws c10::ValueError if seq_len is below 1, offset below 0, or their sum above
  /// max_context_length.
  Tensor forward(int64_t seq_len, int64_t offset = 0);

  SinusoidalPositionalEmbeddingOptions options;

  /// The table [max_context_length, C]. Derived, so neither registered nor saved; `to` rebuilds it
  /// from the formula, so a trip through bfloat16 loses nothing.
  Tensor pe;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(static_cast<int64_t>(0))})

 private:
  void build(torch::Device device, torch::Dtype dtype);
};
TORCH_MODULE(SinusoidalPositionalEmbedding);

}  // namespace attn
