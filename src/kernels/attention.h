#pragma once

// Attention on raw pointers: what the CPU kernels read and write. No LibTorch here, so that a
// kernel compiles in seconds and can run on any threads.
//
// Shapes: q [B, H, T, D], k and v [B, Hkv, S, D], out as q; the last dimension is contiguous, the
// others have any stride (in elements), so the thirds of a packed projection [B, T, 3C] are read in
// place.

#include <cstdint>

namespace attn::kernels {

/// bfloat16 as its bits.
struct BFloat16 {
  uint16_t bits;
};

struct Strides {
  int64_t batch = 0;
  int64_t head = 0;
  int64_t row = 0;
};

/// A head tensor [B, H, rows, D] of elements of type T (const or not).
template <typename T>
struct Heads {
  T* data = nullptr;
  Strides strides;

  T* at(int64_t b, int64_t h) const { return data + b * strides.batch + h * strides.head; }
};

/// What forward and backward have in common.
struct Problem {
  int64_t B = 0, H = 0, Hkv = 0, T = 0, S = 0, D = 0;
  float scale = 1.0F;                 ///< of q · k
  bool causal = true;                 ///< query i sees keys 0 .. S - T + i
  const bool* key_padding = nullptr;  ///< [B, S], true = no query sees the key; or none
  int64_t key_padding_row = 0;        ///< its stride from one batch to the next
  float dropout_p = 0.0F;             ///< in [0, 1]
  uint64_t dropout_seed = 0;
};

template <typename T>
struct ForwardArguments {
  Problem problem;
  Heads<const T> q, k, v;
  Heads<T> out;
  float* logsumexp =
      nullptr;  ///< [B, H, T] natural logarithm, -inf where nothing is seen; or not wanted
};

template <typename T>
struct BackwardArguments {
  Problem problem;
  Heads<const T> q, k, v, out, grad_out;
  const float* logsumexp = nullptr;  ///< [B, H, T], from the forward pass
  bool wants_q = true, wants_k = true, wants_v = true;
  Heads<T> grad_q, grad_k, grad_v;  ///< each written whole where wanted, not touched otherwise
};

/// How a kernel gets its threads: `run(context, n, work, data)` calls work(data, i) for each i in
/// [0, n), on up to n threads at once, and returns when all are done. Calling them one after
/// another is right too.
struct Parallel {
  int threads = 1;  ///< how many `run` would use
  void (*run)(int n, void (*work)(void* data, int index), void* data) = nullptr;
};

/// Scratch memory, aligned to 64 bytes: LibTorch's allocator, or malloc in a build without it.
struct Allocator {
  void* (*allocate)(uint64_t bytes) = nullptr;
  void (*release)(void* pointer) = nullptr;
};

/// y = x · weightᵀ + bias: weight [out, in] with contiguous rows.
struct Projection {
  const float* weight = nullptr;
  int64_t row = 0;              ///< stride of the weight, in elements
  const float* bias = nullptr;  ///< [out], or none
};

/// A whole self-attention module: x [B, T, C] -> attention of its packed projection -> projection
/// -> out [B, T, C], both contiguous. S = T, Hkv = H, no dropout.
struct ModuleArguments {
  Problem problem;
  const float* x = nullptr;
  float* out = nullptr;
  Projection qkv;   ///< [3C, C]
  Projection proj;  ///< [C, C]
};

template <typename T>
void attention_forward(const ForwardArguments<T>& arguments, const Parallel& parallel,
                       const Allocator& allocator);

/// Whether `module_forward` is measured faster than its three parts one by one.
bool module_forward_pays(const Problem& problem, int threads);
void module_forward(const ModuleArguments& arguments, const Parallel& parallel,
                    const Allocator& allocator);

template <typename T>
void attention_backward(const BackwardArguments<T>& arguments, const Parallel& parallel,
                        const Allocator& allocator);

}  // namespace attn::kernels
