#pragma once

// Which keys which queries see, as one rule for every mask: the keys that anyone may see lie side
// by side, and query t sees the first `limit(t)` of them. Causal, bidirectional, S != T and padding
// differ only in the limits, which never fall as t grows.

#include "attention.h"

#include <algorithm>
#include <cstdint>

namespace attn::kernels {

class Visibility {
 public:
  /// `seen_before` has S + 1 elements and `positions` S; both are used, and filled, only with
  /// padding.
  Visibility(const Problem& problem, int64_t batch, int32_t* seen_before, int32_t* positions)
      : T_(problem.T),
        S_(problem.S),
        causal_(problem.causal),
        seen_before_(nullptr),
        positions_(nullptr) {
    if (problem.key_padding == nullptr) return;
    const bool* padding = problem.key_padding + batch * problem.key_padding_row;
    int32_t count = 0;
    for (int64_t s = 0; s < S_; ++s) {
      seen_before[s] = count;
      if (!padding[s]) positions[count++] = static_cast<int32_t>(s);
    }
    seen_before[S_] = count;
    seen_before_ = seen_before;
    positions_ = positions;
  }

  bool padded() const { return seen_before_ != nullptr; }
  /// Number of keys that are no padding.
  int64_t keys() const { return padded() ? seen_before_[S_] : S_; }
  /// Where key number `i` of those lies.
  int64_t position(int64_t i) const { return padded() ? positions_[i] : i; }
  /// How many of those query t sees.
  int32_t limit(int64_t t) const {
    const int64_t reach = causal_ ? std::clamp<int64_t>(S_ - T_ + t + 1, 0, S_) : S_;
    return padded() ? seen_before_[reach] : static_cast<int32_t>(reach);
  }
  /// The same for queries t .. t + count - 1.
  void limits(int64_t t, size_t count, int32_t* to) const {
    if (padded()) {
      for (size_t i = 0; i < count; ++i) to[i] = limit(t + static_cast<int64_t>(i));
      return;
    }
    const auto last = static_cast<int32_t>(S_);
    const auto first = static_cast<int32_t>(causal_ ? S_ - T_ + t + 1 : S_);
    const int32_t step = causal_ ? 1 : 0;
    for (int32_t i = 0; i < static_cast<int32_t>(count); ++i)
      to[i] = std::clamp(first + i * step, 0, last);
  }

 private:
  int64_t T_;
  int64_t S_;
  bool causal_;
  const int32_t* seen_before_;
  const int32_t* positions_;
};

}  // namespace attn::kernels
