#pragma once

#include "byte_corpus.h"
#include "options.h"
#include "setup.h"
#include "training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace demo {

/// T + 1 bytes: the model reads the first T and predicts the last T, of which those from `skip` on
/// count.
struct Window {
  int64_t start;
  int64_t skip;
};

/// Every byte of the spans (but the very first of a text) counts once, with at least T / 2 bytes
/// before it to predict it from.
inline std::vector<Window> scoring_windows(const std::vector<Span>& spans, int64_t T) {
  std::vector<Window> windows;
  for (const auto& span : spans) {
    const auto last = static_cast<int64_t>(span.last);
    for (auto next = static_cast<int64_t>(span.first); next < last;) {
      const auto start = std::max<int64_t>(0, std::min(next - T / 2, last - T) - 1);
      windows.push_back({start, std::max<int64_t>(0, next - start - 1)});
      next = start + T + 1;
    }
  }
  return windows;
}

/// `count` of the windows, evenly spread.
inline std::vector<Window> spread(const std::vector<Window>& windows, size_t count) {
  if (windows.size() <= count) return windows;
  std::vector<Window> some;
  for (size_t i = 0; i < count; ++i) some.push_back(windows[i * windows.size() / count]);
  return some;
}

/// A byte corpus as tensors on the device.
class ByteWindows {
 public:
  ByteWindows(const ByteCorpus& corpus, const LanguageModelSizes& sizes, const Setup& setup,
              uint64_t seed)
      : sizes_(sizes), generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {
    const auto& bytes = corpus.bytes();
    std::vector<int64_t> ids(bytes.size());
    std::transform(bytes.begin(), bytes.end(), ids.begin(),
                   [](char c) { return static_cast<int64_t>(static_cast<unsigned char>(c)); });
    ids_ = at::tensor(ids).to(setup.device);
    offsets_ = at::arange(sizes.seq_len + 1, ids_.options());
    std::vector<int64_t> starts;  // windows that lie in one training part
    for (const auto& span : corpus.training()) {
      for (auto i = static_cast<int64_t>(span.first);
           i + sizes.seq_len < static_cast<int64_t>(span.last); ++i) {
        starts.push_back(i);
      }
    }
    starts_ = at::tensor(starts);
  }

  Batch random_batch() {
    const auto chosen = at::randint(0, starts_.numel(), {sizes_.batch_size}, generator_,
                                    at::TensorOptions(at::kLong));
    return batch_at(starts_.index_select(0, chosen).to(ids_.device()));
  }

  /// Mean loss in nats per byte.
  double score(attn::TinyAttentionLM& model, const std::vector<Window>& windows) const {
    const c10::NoGradGuard no_grad;
    constexpr size_t kChunk = 64;
    double sum = 0.0;
    int64_t count = 0;
    for (size_t first = 0; first < windows.size(); first += kChunk) {
      std::vector<int64_t> starts;
      std::vector<int64_t> skips;
      for (size_t i = first; i < std::min(first + kChunk, windows.size()); ++i) {
        starts.push_back(windows[i].start);
        skips.push_back(windows[i].skip);
        count += sizes_.seq_len - windows[i].skip;
      }
      const auto losses =
          losses_of(model, batch_at(at::tensor(starts).to(ids_.device())));  // [B, T]
      const auto counts = offsets_.narrow(0, 0, sizes_.seq_len) >=
                          at::tensor(skips).to(ids_.device()).unsqueeze(1);  // [B, T]
      sum += at::where(counts, losses, at::zeros_like(losses)).sum(at::kDouble).item<double>();
    }
    return sum / static_cast<double>(count);
  }

 private:
  Batch batch_at(const at::Tensor& starts) const {                  // [B]
    const auto tokens = ids_.take(starts.unsqueeze(1) + offsets_);  // [B, T + 1]
    return {tokens.narrow(1, 0, sizes_.seq_len), tokens.narrow(1, 1, sizes_.seq_len)};
  }

  LanguageModelSizes sizes_;
  at::Generator generator_;
  at::Tensor ids_;      // [bytes]
  at::Tensor offsets_;  // 0 .. T
  at::Tensor starts_;   // on the CPU
};

}  // namespace demo
