// Attention backward by recomputation (Dao 2023, FlashAttention-2): the forward kept only the
// logarithm of each row's sum, and five products give all three gradients.
//
//   Sᵀ = K Qᵀ, Pᵀ = 2^(Sᵀ - log sum)        dV += Pᵀ dO
//   dPᵀ = V dOᵀ, dSᵀ = Pᵀ (dPᵀ - delta)     dK += dSᵀ Q     dQ += dS K       delta = rowsum(dO * O)
//
// Blocking: key blocks of 96 outside, query blocks of 48 inside, from the diagonal down. Pᵀ of a
// pair of blocks [96][48] is 18 KiB and becomes dSᵀ in place; queries lie in lanes, so both are
// read by broadcast for every product and nothing but Q and dO is transposed, once a head. dK and
// dV of the key block and dQ of the head collect in buffers of the thread.
//
// A unit of work is a key/value head with all the query heads it serves. Where heads are few, a
// head's key blocks are dealt to as many units as there are threads, in a fixed order, each with
// its own dQ; one more pass adds those up. Units write disjoint rows, and nothing depends on
// timing: results are bit-equal from run to run.

#include "kernels/attention.h"
#include "kernels/schedule.h"
#include "kernels/visibility.h"

#include <cmath>

// Highway includes this file again from here, once per instruction set.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention_backward.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "kernels/tile-inl.h"
// clang-format on

#ifndef ATTN_KERNELS_BACKWARD_PLAN_
#define ATTN_KERNELS_BACKWARD_PLAN_
namespace attn::kernels {

/// What a backward call decided before its workers start.
template <typename T>
struct BackwardPlan {
  const BackwardArguments<T>* arguments;
  const Allocator* allocator;
  Dealer* dealer;
  int parts;          ///< units a key/value head is split into
  float* partial_dq;  ///< [B, H, parts, T, D] when parts > 1 and dQ is wanted
};

}  // namespace attn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace attn::kernels::HWY_NAMESPACE {
namespace {

constexpr size_t kKeys = 96;  // in a block; 48 to 192 are equally fast

template <typename T>
class Worker {
 public:
  explicit Worker(const BackwardPlan<T>& plan)
      : plan_(plan),
        problem_(plan.arguments->problem),
        depth_(static_cast<size_t>(problem_.D)),
        width_(RoundUp(depth_, kLanes)),
        query_blocks_((static_cast<size_t>(problem_.T) + kQueries - 1) / kQueries),
        philox_(problem_) {
    const auto S = static_cast<size_t>(problem_.S);
    const size_t T_up = query_blocks_ * kQueries;
    const bool padded = problem_.key_padding != nullptr;
    const bool in_place = sizeof(T) == sizeof(float) && width_ == depth_;
    pack_rows_ = !in_place || problem_.T >= 384;
    pack_keys_ = !in_place || padded || problem_.S >= 384;
    const size_t tile = (kKeys + 4) * kQueries;
    const size_t sizes[] = {
        tile,                               // weights
        dropout() ? tile : 0,               // dropped weights
        dropout() ? tile : 0,               // dropout factors
        T_up * depth_,                      // Q transposed
        T_up * depth_,                      // dO transposed
        pack_rows_ ? T_up * width_ : 0,     // Q
        pack_rows_ ? T_up * width_ : 0,     // dO
        pack_keys_ ? (S + 1) * width_ : 0,  // K
        pack_keys_ ? (S + 1) * width_ : 0,  // V
        S * width_,                         // dK
        S * width_,                         // dV
        T_up * width_,                      // dQ
        T_up,                               // log sums
        T_up,                               // deltas
        T_up,                               // limits
        padded ? 2 * S + 2 : 0,             // visibility
        depth_ * kQueries,                  // O transposed
    };
    size_t floats = 0;
    for (const size_t size : sizes) floats += RoundUp(size, 16);
    memory_ = static_cast<float*>(plan.allocator->allocate(floats * sizeof(float)));
    float* next = memory_;
    float** const parts[] = {&p_,        &dropped_,  &factors_, &qt_, &gt_, &packed_q_,  &packed_g_,
                             &packed_k_, &packed_v_, &dk_,      &dv_, &dq_, &log_total_, &delta_};
    size_t i = 0;
    for (float** part : parts) {
      *part = next;
      next += RoundUp(sizes[i++], 16);
    }
    limits_ = reinterpret_cast<int32_t*>(next);
    next += RoundUp(sizes[i++], 16);
    indices_ = padded ? reinterpret_cast<int32_t*>(next) : nullptr;
    next += RoundUp(sizes[i++], 16);
    column_ = next;
  }
  ~Worker() { plan_.allocator->release(memory_); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  HWY_ATTR void Run(int index) {
    for (int64_t unit; (unit = plan_.dealer->take(index)) != plan_.dealer->none();) {
      const int64_t head = unit / plan_.parts;
      KeyHead(head / problem_.Hkv, head % problem_.Hkv, static_cast<int>(unit % plan_.parts));
    }
  }

 private:
  bool dropout() const { return problem_.dropout_p > 0.0F; }

  // Key blocks are dealt like this: 0 1 2 2 1 0 0 1 ...: early ones are seen by more queries.
  bool Mine(size_t block, int part) const {
    const size_t n = static_cast<size_t>(plan_.parts);
    const size_t turn = block % (2 * n);
    return (turn < n ? turn : 2 * n - 1 - turn) == static_cast<size_t>(part);
  }

  HWY_ATTR void KeyHead(int64_t b, int64_t kv_head, int part) {
    const auto& a = *plan_.arguments;
    const Visibility seen(problem_, b, indices_, indices_ + problem_.S + 1);
    const auto keys = static_cast<size_t>(seen.keys());
    const T* k = a.k.at(b, kv_head);
    const T* v = a.v.at(b, kv_head);
    if (pack_keys_) {
      for (size_t i = 0; i < keys; ++i) {
        PackRow(k + seen.position(i) * a.k.strides.row, depth_, packed_k_ + i * width_, width_);
        PackRow(v + seen.position(i) * a.v.strides.row, depth_, packed_v_ + i * width_, width_);
      }
      k_ = packed_k_, k_row_ = width_;
      v_ = packed_v_, v_row_ = width_;
    } else if constexpr (sizeof(T) == sizeof(float)) {
      k_ = k, k_row_ = static_cast<size_t>(a.k.strides.row);
      v_ = v, v_row_ = static_cast<size_t>(a.v.strides.row);
    }
    std::memset(dk_, 0, keys * width_ * sizeof(float));
    std::memset(dv_, 0, keys * width_ * sizeof(float));

    const int64_t group = problem_.H / problem_.Hkv;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      QueryHead(b, h, seen);
      for (size_t block = 0, n0 = 0; n0 < keys; ++block, n0 += kKeys) {
        if (!Mine(block, part)) continue;
        const size_t n1 = std::min(n0 + kKeys, keys);
        for (size_t q0 = 0; q0 < static_cast<size_t>(problem_.T); q0 += kQueries)
          BlockPair(n0, n1, q0);
      }
      WriteQueries(b, h, part);
    }
    WriteKeys(b, kv_head, part, seen);
  }

  // What the key blocks need of one query head.
  HWY_ATTR void QueryHead(int64_t b, int64_t h, const Visibility& seen) {
    const auto& a = *plan_.arguments;
    const auto T_ = static_cast<size_t>(problem_.T);
    const T* q = a.q.at(b, h);
    const T* g = a.grad_out.at(b, h);
    const T* out = a.out.at(b, h);
    const float* log_total = a.logsumexp + (b * problem_.H + h) * problem_.T;
    head_number_ = static_cast<uint32_t>(b * problem_.H + h);
    for (size_t t = 0; t < T_; t += kLanes) {
      const size_t count = std::min<size_t>(kLanes, T_ - t);
      const size_t at = t / kQueries * kQueries * depth_ + t % kQueries;
      PackColumns(q + t * a.q.strides.row, a.q.strides.row, count, depth_,
                  problem_.scale * 1.44269504F, qt_ + at);
      PackColumns(g + t * a.grad_out.strides.row, a.grad_out.strides.row, count, depth_, 1.0F,
                  gt_ + at);
      // Summed in the order of dweight below: a row that sees one key then has score gradients of
      // exactly 0.
      const DF d;
      PackColumns(out + t * a.out.strides.row, a.out.strides.row, count, depth_, 1.0F, column_);
      VF delta = hn::Zero(d);
      for (size_t x = 0; x < depth_; ++x)
        delta = hn::MulAdd(hn::Load(d, column_ + x * kQueries),
                           hn::Load(d, gt_ + at + x * kQueries), delta);
      hn::Store(delta, d, delta_ + t);
    }
    if (pack_rows_) {
      for (size_t t = 0; t < T_; ++t) {
        PackRow(q + t * a.q.strides.row, depth_, packed_q_ + t * width_, width_);
        PackRow(g + t * a.grad_out.strides.row, depth_, packed_g_ + t * width_, width_);
      }
      q_ = packed_q_, q_row_ = width_;
      g_ = packed_g_, g_row_ = width_;
    } else if constexpr (sizeof(T) == sizeof(float)) {
      q_ = q, q_row_ = static_cast<size_t>(a.q.strides.row);
      g_ = g, g_row_ = static_cast<size_t>(a.grad_out.strides.row);
    }
    for (size_t t = 0; t < T_; ++t) {
      log_total_[t] = log_total[t];
      limits_[t] = seen.limit(static_cast<int64_t>(t));
    }
    for (size_t t = T_; t < query_blocks_ * kQueries; ++t) log_total_[t] = 0.0F;
    std::memset(dq_, 0, T_ * width_ * sizeof(float));
  }

  // Keys n0 .. n1 - 1 against queries q0 .. q0 + 47.
  HWY_ATTR void BlockPair(size_t n0, size_t n1, size_t q0) {
    const size_t rows = std::min<size_t>(kQueries, static_cast<size_t>(problem_.T) - q0);
    const int32_t* limits = limits_ + q0;
    if (static_cast<size_t>(limits[rows - 1]) <= n0)
      return;  // none of these queries sees any of these keys
    const size_t vectors = (rows + kLanes - 1) / kLanes;

    // Where each product's rows begin and end: key r is seen by queries first_[r] .. rows - 1,
    // query r sees keys 0 .. ends_[r] - 1 of the block.
    size_t query = 0;
    for (size_t n = n0; n < n1; ++n) {
      while (query < rows && static_cast<size_t>(limits[query]) <= n) ++query;
      first_[n - n0] = static_cast<int32_t>(query);
    }
    std::fill(last_, last_ + kKeys, static_cast<int32_t>(rows));
    for (size_t r = 0; r < rows; ++r)
      ends_[r] = std::clamp<int32_t>(limits[r] - static_cast<int32_t>(n0), 0,
                                     static_cast<int32_t>(n1 - n0));

    const float* qt = qt_ + q0 * depth_;
    const float* gt = gt_ + q0 * depth_;
    Pairs(n0, n1, rows, vectors, [&](auto sizes, size_t n, size_t j) HWY_ATTR {
      Weights<decltype(sizes)>(n, n0, q0, j, qt);
    });
    if (dropout()) Drop(n0, n1, q0, rows, vectors);
    const auto& a = *plan_.arguments;
    if (a.wants_v) {
      SumAll<kQueries, 1>(dropout() ? dropped_ : p_, g_ + q0 * g_row_, g_row_, {first_, last_},
                          n1 - n0, rows, dv_ + n0 * width_);
    }
    if (!a.wants_q && !a.wants_k) return;
    Pairs(n0, n1, rows, vectors, [&](auto sizes, size_t n, size_t j) HWY_ATTR {
      ScoreGradients<decltype(sizes)>(n, n0, q0, j, gt);
    });
    if (a.wants_k) {
      SumAll<kQueries, 1>(p_, q_ + q0 * q_row_, q_row_, {first_, last_}, n1 - n0, rows,
                          dk_ + n0 * width_);
    }
    if (a.wants_q) {
      SumAll<1, kQueries>(p_, k_ + n0 * k_row_, k_row_, {zeros_, ends_}, rows, n1 - n0,
                          dq_ + q0 * width_);
    }
  }

  template <int kRows_, int kVectors_>
  struct Sizes {
    static constexpr int kRows = kRows_;
    static constexpr int kVectors = kVectors_;
  };

  // Calls tile(Sizes, key, vector) over the pairs that are seen, a vector of queries at a time.
  // What a lane computes for a key it does not see is never read: the sums skip it.
  template <class Tile>
  HWY_ATTR void Pairs(size_t n0, size_t n1, size_t rows, size_t vectors, const Tile& tile) {
    size_t key = n0;
    for (size_t j = 0; j < vectors && key < n1; ++j) {
      const size_t end = n0 + static_cast<size_t>(ends_[std::min((j + 1) * kLanes, rows) - 1]);
      if (end > key) PairVectors(key, end, j, vectors, tile);
      key = std::max(key, end);
    }
  }

  template <class Tile>
  HWY_ATTR void PairVectors(size_t key, size_t end, size_t j, size_t vectors, const Tile& tile) {
    for (size_t count; j < vectors; j += count) {
      count = std::min<size_t>(kScoreVectors, vectors - j);
      switch (count) {
        case 1:
          PairRows<1>(key, end, j, tile);
          break;
        case 2:
          PairRows<std::min(2, kScoreVectors)>(key, end, j, tile);
          break;
        case 3:
          PairRows<std::min(3, kScoreVectors)>(key, end, j, tile);
          break;
        default:
          PairRows<std::min(4, kScoreVectors)>(key, end, j, tile);
      }
    }
  }

  template <int kVectors, class Tile>
  HWY_NOINLINE HWY_ATTR void PairRows(size_t key, size_t end, size_t j, const Tile& tile) {
    constexpr int kMost = 2 * kVectors <= kScoreVectors ? 2 * kScoreRows : kScoreRows;
    for (; key + kMost <= end; key += kMost) tile(Sizes<kMost, kVectors>(), key, j);
    if constexpr (kMost > 8) {
      if (key + 8 <= end) tile(Sizes<8, kVectors>(), key, j), key += 8;
    }
    if constexpr (kMost > 4) {
      if (key + 4 <= end) tile(Sizes<4, kVectors>(), key, j), key += 4;
    }
    if (key + 2 <= end) tile(Sizes<2, kVectors>(), key, j), key += 2;
    if (key < end) tile(Sizes<1, kVectors>(), key, j);
  }

  // p[key - n0][query] = 2^(score - log sum). The log sum is subtracted after the dot product:
  // folding it into the sums' start loses digits.
  template <class S>
  HWY_INLINE void Weights(size_t key, size_t n0, size_t q0, size_t j, const float* qt) {
    const DF d;
    float* p = p_ + (key - n0) * kQueries + j * kLanes;
    const float* log_total = log_total_ + q0 + j * kLanes;
    ScoreTile<S::kRows, S::kVectors>(
        k_ + key * k_row_, k_row_, qt + j * kLanes, depth_, [&](int i, int c, VF score) HWY_ATTR {
          const VF weight = Exp2(
              hn::Min(hn::Sub(score, hn::Load(d, log_total + c * kLanes)), hn::Set(d, 127.0F)));
          hn::Store(weight, d, p + i * kQueries + c * kLanes);
        });
  }

  // p becomes the gradient of the scores: weight * (factor * dweight - delta).
  template <class S>
  HWY_INLINE void ScoreGradients(size_t key, size_t n0, size_t q0, size_t j, const float* gt) {
    const DF d;
    const size_t at = (key - n0) * kQueries + j * kLanes;
    float* p = p_ + at;
    const float* factors = factors_ + at;
    const float* delta = delta_ + q0 + j * kLanes;
    const bool dropped = dropout();
    ScoreTile<S::kRows, S::kVectors>(
        v_ + key * v_row_, v_row_, gt + j * kLanes, depth_, [&](int i, int c, VF dweight) HWY_ATTR {
          float* to = p + i * kQueries + c * kLanes;
          if (dropped) dweight = hn::Mul(dweight, hn::Load(d, factors + i * kQueries + c * kLanes));
          hn::Store(hn::Mul(hn::Load(d, to), hn::Sub(dweight, hn::Load(d, delta + c * kLanes))), d,
                    to);
        });
  }

  HWY_ATTR void Drop(size_t n0, size_t n1, size_t q0, size_t rows, size_t vectors) {
    const DF d;
    for (size_t j = 0; j < vectors; ++j) {
      const auto end = static_cast<size_t>(ends_[std::min((j + 1) * kLanes, rows) - 1]);
      if (end == 0) continue;
      DropoutFactors(philox_, head_number_, static_cast<uint32_t>(q0 + j * kLanes),
                     static_cast<uint32_t>(n0), static_cast<uint32_t>(n0 + std::min(end, n1 - n0)),
                     factors_ + j * kLanes);
      for (size_t n = 0; n < end; ++n) {
        const size_t at = n * kQueries + j * kLanes;
        hn::Store(hn::Mul(hn::Load(d, p_ + at), hn::Load(d, factors_ + at)), d, dropped_ + at);
      }
    }
  }

  // to[r][:] += sum over `depth` rows of b, weighted by a (see SumTile), for all `rows` rows.
  template <int kARow, int kADepth>
  HWY_ATTR void SumAll(const float* a, const float* b, size_t b_row, const DepthRange& range,
                       size_t rows, size_t depth, float* to) {
    size_t x = 0;
    for (; x + kSumVectors * kLanes <= width_; x += kSumVectors * kLanes)
      SumRows<kSumVectors, kARow, kADepth>(a, b + x, b_row, range, rows, depth, to + x);
    if constexpr (kSumVectors > 2) {
      for (; x + 2 * kLanes <= width_; x += 2 * kLanes)
        SumRows<2, kARow, kADepth>(a, b + x, b_row, range, rows, depth, to + x);
    }
    if constexpr (kSumVectors > 1) {
      for (; x < width_; x += kLanes)
        SumRows<1, kARow, kADepth>(a, b + x, b_row, range, rows, depth, to + x);
    }
  }

  template <int kVectors, int kARow, int kADepth>
  HWY_NOINLINE HWY_ATTR void SumRows(const float* a, const float* b, size_t b_row,
                                     const DepthRange& range, size_t rows, size_t depth,
                                     float* to) {
    constexpr int kMost = kVectors <= 2 && kVectors < kSumVectors ? 2 * kSumRows : kSumRows;
    const auto tile = [&](auto number, size_t r) HWY_ATTR {
      const DF d;
      float* sums = to + r * width_;
      SumTile<decltype(number)::value, kVectors, kARow, kADepth>(
          a + r * kARow, b, b_row, {range.begin + r, range.end + r}, 0, static_cast<int32_t>(depth),
          [&](int i, int c) HWY_ATTR { return hn::Load(d, sums + i * width_ + c * kLanes); },
          [&](int i, int c, VF sum)
              HWY_ATTR { hn::Store(sum, d, sums + i * width_ + c * kLanes); });
    };
    size_t r = 0;
    for (; r + kMost <= rows; r += kMost) tile(std::integral_constant<int, kMost>(), r);
    if constexpr (kMost > 6) {
      if (r + 6 <= rows) tile(std::integral_constant<int, 6>(), r), r += 6;
    }
    if constexpr (kMost > 4) {
      if (r + 4 <= rows) tile(std::integral_constant<int, 4>(), r), r += 4;
    }
    if (r + 2 <= rows) tile(std::integral_constant<int, 2>(), r), r += 2;
    if (r + 2 <= rows) tile(std::integral_constant<int, 2>(), r), r += 2;
    if (r < rows) tile(std::integral_constant<int, 1>(), r);
  }

  HWY_ATTR void WriteQueries(int64_t b, int64_t h, int part) {
    if (!plan_.arguments->wants_q) return;
    if (plan_.parts > 1) {
      float* to =
          plan_.partial_dq + ((b * problem_.H + h) * plan_.parts + part) * problem_.T * problem_.D;
      for (int64_t t = 0; t < problem_.T; ++t)
        std::memcpy(to + t * depth_, dq_ + t * width_, depth_ * sizeof(float));
      return;
    }
    const auto& to = plan_.arguments->grad_q;
    for (int64_t t = 0; t < problem_.T; ++t)
      WriteRow(dq_ + t * width_, depth_, problem_.scale, to.at(b, h) + t * to.strides.row);
  }

  // Rows of this part's key blocks; the first part also clears the rows of padding.
  HWY_ATTR void WriteKeys(int64_t b, int64_t kv_head, int part, const Visibility& seen) {
    const auto& a = *plan_.arguments;
    if (a.wants_k) WriteKeyRows(dk_, problem_.scale, a.grad_k, b, kv_head, part, seen);
    if (a.wants_v) WriteKeyRows(dv_, 1.0F, a.grad_v, b, kv_head, part, seen);
  }

  HWY_ATTR void WriteKeyRows(const float* from, float scale, const Heads<T>& grad, int64_t b,
                             int64_t kv_head, int part, const Visibility& seen) {
    T* to = grad.at(b, kv_head);
    int64_t next = 0;  // first row not written or passed over yet
    const auto clear_until = [&](int64_t end) HWY_ATTR {
      for (; part == 0 && next < end; ++next) {
        for (size_t x = 0; x < depth_; ++x) FromFloat(0.0F, to[next * grad.strides.row + x]);
      }
      next = end;
    };
    for (int64_t i = 0; i < seen.keys(); ++i) {
      const int64_t row = seen.position(i);
      clear_until(row);
      next = row + 1;
      if (!Mine(static_cast<size_t>(i) / kKeys, part)) continue;
      WriteRow(from + i * width_, depth_, scale, to + row * grad.strides.row);
    }
    clear_until(problem_.S);
  }

  const BackwardPlan<T>& plan_;
  const Problem& problem_;
  const size_t depth_;  // D
  const size_t width_;  // D rounded up to whole vectors
  const size_t query_blocks_;
  const Philox philox_;
  bool pack_rows_;
  bool pack_keys_;
  float* memory_;
  float *p_, *dropped_, *factors_;  // tiles [kKeys][kQueries]
  float *qt_, *gt_;                 // [block][D][kQueries]
  float *packed_q_, *packed_g_, *packed_k_, *packed_v_;
  float *dk_, *dv_, *dq_;
  float *log_total_, *delta_;
  int32_t* limits_;
  int32_t* indices_;
  float* column_;

  const float *q_ = nullptr, *g_ = nullptr, *k_ = nullptr, *v_ = nullptr;
  size_t q_row_ = 0, g_row_ = 0, k_row_ = 0, v_row_ = 0;
  uint32_t head_number_ = 0;

  int32_t first_[kKeys], last_[kKeys];
  int32_t ends_[kQueries];
  int32_t zeros_[kQueries] = {};
};

template <typename T>
HWY_ATTR void Work(void* data, int index) {
  Worker<T>(*static_cast<const BackwardPlan<T>*>(data)).Run(index);
}

// grad_q of the head `index`: the parts' sum, in their order.
template <typename T>
HWY_ATTR void AddParts(void* data, int index) {
  const auto& plan = *static_cast<const BackwardPlan<T>*>(data);
  const Problem& p = plan.arguments->problem;
  for (int64_t unit; (unit = plan.dealer->take(index)) != plan.dealer->none();) {
    const int64_t t = unit % p.T;
    const int64_t head = unit / p.T;
    const float* from = plan.partial_dq + (head * plan.parts * p.T + t) * p.D;
    T* to =
        plan.arguments->grad_q.at(head / p.H, head % p.H) + t * plan.arguments->grad_q.strides.row;
    for (int64_t x = 0; x < p.D; ++x) {
      float sum = 0.0F;
      for (int part = 0; part < plan.parts; ++part) sum += from[part * p.T * p.D + x];
      FromFloat(sum * p.scale, to[x]);
    }
  }
}

}  // namespace

void BackwardFloat(void* data, int index) {
  Work<float>(data, index);
}
void BackwardBFloat16(void* data, int index) {
  Work<BFloat16>(data, index);
}
void AddPartsFloat(void* data, int index) {
  AddParts<float>(data, index);
}
void AddPartsBFloat16(void* data, int index) {
  AddParts<BFloat16>(data, index);
}

}  // namespace attn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attn::kernels {

HWY_EXPORT(BackwardFloat);
HWY_EXPORT(BackwardBFloat16);
HWY_EXPORT(AddPartsFloat);
HWY_EXPORT(AddPartsBFloat16);

namespace {
constexpr int64_t kKeyBlock = 96;  // kKeys above

// As in the forward; the backward does 2.5 times its work.
constexpr double kSerialMicroseconds = 5.0;

double estimated_microseconds(const Problem& p) {
  const double pairs = static_cast<double>(p.T) * static_cast<double>(p.S) * (p.causal ? 0.5 : 1.0);
  const double heads = static_cast<double>(p.B * p.H);
  return heads * (0.3 + pairs * 10.0 * static_cast<double>(p.D + 8) / 40e3);
}
}  // namespace

template <typename T>
void attention_backward(const BackwardArguments<T>& arguments, const Parallel& parallel,
                        const Allocator& allocator) {
  const Problem& p = arguments.problem;
  if (p.B * p.H * (p.T + p.S) == 0) return;
  const bool is_float = sizeof(T) == sizeof(float);
  const bool serial = parallel.threads == 1 || estimated_microseconds(p) < kSerialMicroseconds;
  const int workers = serial ? 1 : parallel.threads;
  const int64_t key_heads = p.B * p.Hkv;
  const int64_t key_blocks = (p.S + kKeyBlock - 1) / kKeyBlock;
  const bool split = workers > 1 && key_heads < 2 * workers && key_blocks > 1;
  const int parts = split ? static_cast<int>(std::min<int64_t>(workers, key_blocks)) : 1;

  BackwardPlan<T> plan{&arguments, &allocator, nullptr, parts, nullptr};
  const auto run = [&](int64_t units, auto work) {
    Dealer dealer(units, workers);
    plan.dealer = &dealer;
    if (workers == 1) {
      work(&plan, 0);
    } else {
      parallel.run(workers, work, &plan);
    }
  };
  if (parts > 1 && arguments.wants_q)
    plan.partial_dq =
        static_cast<float*>(allocator.allocate(sizeof(float) * p.B * p.H * parts * p.T * p.D));
  run(key_heads * parts,
      is_float ? HWY_DYNAMIC_DISPATCH(BackwardFloat) : HWY_DYNAMIC_DISPATCH(BackwardBFloat16));
  if (plan.partial_dq != nullptr) {
    run(p.B * p.H * p.T,
        is_float ? HWY_DYNAMIC_DISPATCH(AddPartsFloat) : HWY_DYNAMIC_DISPATCH(AddPartsBFloat16));
    allocator.release(plan.partial_dq);
  }
}

template void attention_backward(const BackwardArguments<float>&, const Parallel&,
                                 const Allocator&);
template void attention_backward(const BackwardArguments<BFloat16>&, const Parallel&,
                                 const Allocator&);

}  // namespace attn::kernels
#endif
