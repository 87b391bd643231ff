#pragma once

// How work units go to threads.

#include <atomic>
#include <cstdint>
#include <vector>

namespace attn::kernels {

/// Deals units 0 .. count - 1: each worker takes a contiguous range of its own first, then helps
/// the others. One shared counter would hand neighbouring heads to different cores, whose cache
/// lines then bounce: B 16, T 8, H 4 took 37 µs that way and 17 µs this way.
class Dealer {
 public:
  Dealer(int64_t count, int workers) : count_(count), ranges_(static_cast<size_t>(workers)) {
    for (int i = 0; i < workers; ++i) {
      ranges_[i].next.store(count * i / workers, std::memory_order_relaxed);
      ranges_[i].end = count * (i + 1) / workers;
    }
  }

  /// The next unit for `worker`, or `none()`.
  int64_t take(int worker) {
    const auto workers = static_cast<int>(ranges_.size());
    for (int i = 0; i < workers; ++i) {
      Range& range = ranges_[(worker + i) % workers];
      if (range.next.load(std::memory_order_relaxed) >= range.end) continue;
      const int64_t unit = range.next.fetch_add(1, std::memory_order_relaxed);
      if (unit < range.end) return unit;
    }
    return none();
  }
  int64_t none() const { return count_; }

 private:
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  int64_t count_;
  std::vector<Range> ranges_;
};

}  // namespace attn::kernels
