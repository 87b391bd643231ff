#pragma once

#include <attn/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace attn {

using at::Tensor;

/// Options of `KVCache`: `KVCacheOptions(12, 1, 12, 64, 1024).dtype(torch::kBFloat16)`.
struct ATTN_API KVCacheOptions {
  KVCacheOptions(int64_t n_layers, int64_t batch, int64_t n_heads, int64_t d_head, int64_t capacity)
      : n_layers_(n_layers),
        batch_(batch),
        n_heads_(n_heads),
        d_head_(d_head),
        capacity_(capacity) {}

  TORCH_ARG(int64_t, n_layers);  ///< L
  TORCH_ARG(int64_t, batch);     ///< B
  TORCH_ARG(int64_t, n_heads);   ///< H
  TORCH_ARG(int64_t, d_head);    ///< D
  TORCH_ARG(int64_t, capacity);  ///< most tokens it holds, S
  TORCH_ARG(c10::ScalarType, dtype) = c10::kFloat;
  TORCH_ARG(c10::Device, device) = c10::Device(c10::kCPU);
};

/// The keys and values of what a model has read, so that the next tokens need no second look at it.
///
/// The caller owns it and hands it to `forward` with the new tokens only; one cache serves all
/// layers of one model and one batch. It is allocated whole: 2 L B H S D elements. Any way of
/// cutting a sequence into pieces gives the logits of one whole forward, to rounding (1e-4 in
/// float32 for logits of usual size, 1e-10 in float64).
///
/// @code
/// attn::TinyAttentionLM model(/*vocab_size=*/64, /*d_model=*/32, /*n_heads=*/4,
///                             /*max_context_length=*/12);
/// const torch::NoGradGuard no_grad;
/// attn::KVCache cache = model->make_cache(/*batch=*/1, /*capacity=*/12);
/// torch::Tensor prompt = torch::randint(0, 64, {1, 5});
/// torch::Tensor logits = model(prompt, torch::Tensor(), &cache);  // [1, 5, 64]
/// torch::Tensor next = logits.select(1, 4).argmax(-1, true);      // [1, 1]
/// logits = model(next, torch::Tensor(), &cache);                  // [1, 1, 64]
/// // cache.length() is now 6
/// @endcode
///
/// A module that is no whole model (SelfAttention, TransformerBlock, ...) takes a layer of it; its
/// caller then advances the length once per piece, after the last layer:
///
/// @code
/// attn::SelfAttention attention(/*n_embd=*/8, /*n_head=*/2);
/// const torch::NoGradGuard no_grad;
/// attn::KVCache cache(attn::KVCacheOptions(/*n_layers=*/1, /*batch=*/1, /*n_heads=*/2,
///                                          /*d_head=*/4, /*capacity=*/16));
/// for (int i = 0; i < 3; ++i) {
///   torch::Tensor y = attention(torch::randn({1, 1, 8}), torch::Tensor(), &cache.layer(0));
///   cache.advance(1);
/// }
/// @endcode
class ATTN_API KVCache {
 public:
  /// The keys and values of one attention layer. Owned by the cache.
  class ATTN_API Layer {
   public:
    /// Writes k and v [B, H, T, D] behind what is there; returns all of it, keys and values
    /// [B, H, length + T, D], views of the cache. The length stays: `KVCache::advance` moves it.
    /// @throws c10::ValueError if they do not fit the cache's shape, dtype, device or room, or a
    /// gradient is wanted: a cache is for inference.
    std::pair<Tensor, Tensor> append(const Tensor& k, const Tensor& v);

    int64_t length() const;  ///< tokens that all layers have

   private:
    friend class KVCache;
    struct Shared;
    std::shared_ptr<const Shared> shared_;
    Tensor keys_, values_;  // [B, H, S, D]
  };

  /// @throws c10::ValueError if a size is below 1 (batch: below 0).
  explicit KVCache(const KVCacheOptions& options);
  KVCache(KVCache&&) noexcept = default;
  KVCache& operator=(KVCache&&) noexcept = default;
  KVCache(const KVCache&) = delete;  ///< a costly copy has a verb: `clone`
  KVCache& operator=(const KVCache&) = delete;

  int64_t length() const;  ///< tokens held
  int64_t capacity() const;
  const KVCacheOptions& options() const;

  /// @throws c10::ValueError if there is no such layer.
  Layer& layer(int64_t i);

  /// Room for `tokens` more of a batch of that size in so many layers: what a model asks before its
  /// first layer.
  /// @throws c10::ValueError that names the numbers.
  void check_room(int64_t n_layers, int64_t batch, int64_t tokens) const;
  /// Counts `tokens` more as held, after every layer has appended them.
  void advance(int64_t tokens);
  /// Forgets all but the first `length` tokens.
  /// @throws c10::ValueError unless 0 <= length <= length().
  void truncate(int64_t length);
  void reset() { truncate(0); }
  /// A cache of its own with the same content.
  KVCache clone() const;

 private:
  std::shared_ptr<Layer::Shared> shared_;
  std::vector<Layer> layers_;
};

}  // namespace attn
