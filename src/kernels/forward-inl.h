// Attention forward: softmax(scale q kᵀ) v with online softmax (Milakov & Gimelshein 2018; Dao et
// al. 2022).
//
// A unit of work is a head, or 48 queries of one where heads are few. Blocking, per 48 queries:
//   qt [D][48]      the queries transposed, scaled by scale * log2(e), so that exp is exp2
//   s  [96][48]     scores of a block of 96 keys, then their exponentials; 18 KiB, stays in L1
//   o  [48][D]      the running sum, rescaled when a row's maximum grows; the last block writes to
//   the output
// Keys a query does not see are cut, at a vector of queries in q kᵀ and at a row in the sum over
// values: no work is lost to the triangle. K and V are read in place, or packed once a head where
// that is measured faster (long sequences: a row stride of 3C lands each row on another page) or
// needed (bfloat16, padding, D not a multiple of the vector).
//
// Units write disjoint rows of the output, and a unit's arithmetic does not depend on who runs it:
// results are bit-equal for any number of threads.

#include "kernels/attention.h"
#include "kernels/schedule.h"
#include "kernels/visibility.h"

#include <cmath>

#ifndef ATTN_KERNELS_FORWARD_PLAN_
#define ATTN_KERNELS_FORWARD_PLAN_
namespace attn::kernels {

/// What a forward call decided before its workers start.
template <typename T>
struct ForwardPlan {
  const ForwardArguments<T>* arguments;
  const Allocator* allocator;
  Dealer* dealer;
  int64_t query_blocks;
  bool whole_heads;  ///< a unit is a head, else one block of queries
};

}  // namespace attn::kernels
#endif

#if defined(ATTN_KERNELS_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTN_KERNELS_FORWARD_INL_H_
#undef ATTN_KERNELS_FORWARD_INL_H_
#else
#define ATTN_KERNELS_FORWARD_INL_H_
#endif

#include "kernels/tile-inl.h"

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace attn::kernels::HWY_NAMESPACE {
constexpr size_t kKeys = 96;  // in a block; 64 to 192 are equally fast

template <typename T>
class ForwardWorker {
 public:
  explicit ForwardWorker(const ForwardPlan<T>& plan)
      : plan_(plan),
        problem_(plan.arguments->problem),
        depth_(static_cast<size_t>(problem_.D)),
        width_(RoundUp(depth_, kLanes)),
        philox_(problem_) {
    const auto S = static_cast<size_t>(problem_.S);
    const bool padded = problem_.key_padding != nullptr;
    const bool converted = sizeof(T) != sizeof(float);
    pack_k_ = padded || converted || (plan.whole_heads && problem_.T >= 384);
    pack_v_ =
        padded || converted || width_ != depth_ || (plan.whole_heads && problem_.T > 2 * kQueries);
    const size_t keys = std::min(S, kKeys);
    const size_t rows = std::min<size_t>(static_cast<size_t>(problem_.T), kQueries);
    const size_t sizes[] = {
        depth_ * kQueries,                      // Q transposed
        keys * kQueries,                        // scores
        rows * width_,                          // running sums
        dropout() ? (keys + 4) * kQueries : 0,  // dropout factors
        pack_k_ ? S * depth_ + kLanes : 0,      // K; a row is stored in whole vectors
        pack_v_ ? S * width_ : 0,               // V
        padded ? 2 * S + 2 : 0,                 // visibility
    };
    size_t floats = 0;
    for (const size_t size : sizes) floats += RoundUp(size, 16);
    if (floats > kSmall)
      allocated_ = static_cast<float*>(plan.allocator->allocate(floats * sizeof(float)));
    float* next = allocated_ != nullptr ? allocated_ : small_;
    float** const parts[] = {&qt_, &s_, &o_, &factors_, &packed_k_, &packed_v_};
    size_t i = 0;
    for (float** part : parts) {
      *part = next;
      next += RoundUp(sizes[i++], 16);
    }
    indices_ = padded ? reinterpret_cast<int32_t*>(next) : nullptr;
  }
  ~ForwardWorker() {
    if (allocated_ != nullptr) plan_.allocator->release(allocated_);
  }
  ForwardWorker(const ForwardWorker&) = delete;
  ForwardWorker& operator=(const ForwardWorker&) = delete;

  /// Every query of one head.
  HWY_ATTR void WholeHead(int64_t b, int64_t h) { Head(b, h, 0, plan_.query_blocks); }

  HWY_ATTR void Run(int index) {
    for (int64_t unit; (unit = plan_.dealer->take(index)) != plan_.dealer->none();) {
      const int64_t heads = problem_.B * problem_.H;
      const int64_t head = plan_.whole_heads ? unit : unit % heads;
      // Few heads: the longest blocks first.
      const int64_t only = plan_.query_blocks - 1 - unit / heads;
      const int64_t begin = plan_.whole_heads ? 0 : only;
      const int64_t end = plan_.whole_heads ? plan_.query_blocks : only + 1;
      if (plan_.whole_heads && head + 1 < heads) LookAhead(head + 1);
      Head(head / problem_.H, head % problem_.H, begin, end);
    }
  }

 private:
  bool dropout() const { return problem_.dropout_p > 0.0F; }

  // The next head's rows go to the second-level cache meanwhile, a few at each tile: in a packed
  // projection they lie 3C apart, which the processor's own prefetching does not follow (T = 64:
  // 25 % faster).
  void LookAhead(int64_t head) {
    const auto& a = *plan_.arguments;
    const int64_t b = head / problem_.H, h = head % problem_.H;
    const int64_t kv_head = h / (problem_.H / problem_.Hkv);
    const auto bytes = [](const auto& heads, int64_t at_b, int64_t at_h) {
      return reinterpret_cast<const char*>(heads.at(at_b, at_h));
    };
    const auto size = static_cast<int64_t>(sizeof(T));
    ahead_[0] = {bytes(a.q, b, h), a.q.strides.row * size, problem_.T};
    ahead_[1] = {bytes(a.k, b, kv_head), a.k.strides.row * size, problem_.S};
    ahead_[2] = {bytes(a.v, b, kv_head), a.v.strides.row * size, problem_.S};
    ahead_part_ = 0;
    // As many rows a tile as will have gone through when the head at hand is done.
    const double T_ = static_cast<double>(problem_.T);
    const double S_ = static_cast<double>(problem_.S) * (problem_.causal ? 0.5 : 1.0);
    const double tiles = T_ * S_ / 384 + T_ / kSumRows;
    ahead_rows_ = 1 + static_cast<int>((T_ + 2 * static_cast<double>(problem_.S)) / tiles);
  }
  HWY_INLINE void FetchAhead() {
    if (ahead_part_ == 3) return;
    Ahead& ahead = ahead_[ahead_part_];
    const auto bytes = static_cast<int64_t>(depth_ * sizeof(T));
    for (int i = 0; i < ahead_rows_ && ahead.rows > 0; ++i, --ahead.rows, ahead.next += ahead.row) {
      for (int64_t x = 0; x < bytes; x += 64) __builtin_prefetch(ahead.next + x, 0, 2);
    }
    if (ahead.rows <= 0) ++ahead_part_;
  }

  HWY_ATTR void Head(int64_t b, int64_t h, int64_t block_begin, int64_t block_end) {
    const auto& a = *plan_.arguments;
    const int64_t kv_head = h / (problem_.H / problem_.Hkv);
    const T* k = a.k.at(b, kv_head);
    const T* v = a.v.at(b, kv_head);
    const Visibility seen(problem_, b, indices_, indices_ + problem_.S + 1);
    const int64_t last_query = std::min<int64_t>(block_end * kQueries, problem_.T) - 1;
    const int64_t keys = seen.limit(last_query);
    if (pack_k_) {
      for (int64_t i = 0; i < keys; ++i)
        PackRow(k + seen.position(i) * a.k.strides.row, depth_, packed_k_ + i * depth_, depth_);
      k_ = packed_k_;
      k_row_ = depth_;
    } else if constexpr (sizeof(T) == sizeof(float)) {
      k_ = k;
      k_row_ = static_cast<size_t>(a.k.strides.row);
    }
    if (pack_v_) {
      for (int64_t i = 0; i < keys; ++i)
        PackRow(v + seen.position(i) * a.v.strides.row, depth_, packed_v_ + i * width_, width_);
      v_ = packed_v_;
      v_row_ = width_;
    } else if constexpr (sizeof(T) == sizeof(float)) {
      v_ = v;
      v_row_ = static_cast<size_t>(a.v.strides.row);
    }
    head_number_ = static_cast<uint32_t>(b * problem_.H + h);
    for (int64_t block = block_begin; block < block_end; ++block)
      Block(b, h, block * kQueries, seen);
  }

  // Queries q0 .. q0 + 47 of one head.
  HWY_ATTR void Block(int64_t b, int64_t h, int64_t q0, const Visibility& seen) {
    const DF d;
    const auto& a = *plan_.arguments;
    const size_t rows = static_cast<size_t>(std::min<int64_t>(kQueries, problem_.T - q0));
    const size_t vectors = (rows + kLanes - 1) / kLanes;
    const T* q = a.q.at(b, h) + q0 * a.q.strides.row;
    const float scale = problem_.scale * 1.44269504F;  // log2(e)
    for (size_t j = 0; j < vectors; ++j) {
      const size_t count = std::min<size_t>(kLanes, rows - j * kLanes);
      PackColumns(q + j * kLanes * a.q.strides.row, a.q.strides.row, count, depth_, scale,
                  qt_ + j * kLanes);
      hn::Store(hn::Set(d, -std::numeric_limits<float>::infinity()), d, greatest_ + j * kLanes);
      hn::Store(hn::Zero(d), d, total_ + j * kLanes);
    }
    seen.limits(q0, rows, limits_);
    for (size_t i = 0; i < rows; ++i) lane_limits_[i] = static_cast<float>(limits_[i]);
    for (size_t i = rows; i < vectors * kLanes; ++i)
      lane_limits_[i] = 0.0F;  // lanes without a query see nothing

    const auto keys = static_cast<size_t>(limits_[rows - 1]);
    size_t n0 = 0;
    do {  // once even with no key at all: the rows then become zeros
      const size_t n1 = std::min(n0 + kKeys, keys);
      Scores(n0, n1, rows, vectors);
      Exponentials(n0, n1, rows, vectors, static_cast<uint32_t>(q0));
      WeightedSum(n0, n1, rows, /*first=*/n0 == 0, /*last=*/n1 == keys,
                  a.out.at(b, h) + q0 * a.out.strides.row);
      n0 = n1;
    } while (n0 < keys);
    if (a.logsumexp != nullptr) {
      float* to = a.logsumexp + (b * problem_.H + h) * problem_.T + q0;
      for (size_t j = 0; j < vectors; ++j) {
        // log2 of the row's sum of 2^score
        const VF sum =
            hn::Mul(hn::Log(d, hn::Load(d, total_ + j * kLanes)), hn::Set(d, 1.44269504F));
        hn::Store(hn::Add(hn::Load(d, greatest_ + j * kLanes), sum), d, log_total_ + j * kLanes);
      }
      for (size_t i = 0; i < rows; ++i)
        to[i] = limits_[i] > 0 ? log_total_[i] : -std::numeric_limits<float>::infinity();
    }
  }

  // First and one past the last key of query vector j that only some of its lanes see.
  size_t FullEnd(size_t j) const { return static_cast<size_t>(limits_[j * kLanes]); }
  size_t PartEnd(size_t j, size_t rows) const {
    return static_cast<size_t>(limits_[std::min((j + 1) * kLanes, rows) - 1]);
  }

  // s[key - n0][query] for keys n0 .. n1 - 1 and the query vectors that see them; the running
  // maximum.
  HWY_ATTR void Scores(size_t n0, size_t n1, size_t rows, size_t vectors) {
    size_t key = n0;
    for (size_t j = 0; j < vectors; ++j) {
      // A vector with lanes past the last query is treated as partly seen.
      const bool partial = (j + 1) * kLanes > rows;
      const size_t full = partial ? 0 : std::clamp(FullEnd(j), key, n1);
      const size_t end = std::min(PartEnd(j, rows), n1);
      if (full > key) {
        ScoreVectors<false>(key, full, n0, j, vectors);
        key = full;
      }
      if (end > key) {
        ScoreVectors<true>(key, end, n0, j, vectors);
        key = end;
      }
    }
  }

  template <bool kMasked>
  HWY_ATTR void ScoreVectors(size_t key, size_t end, size_t n0, size_t j, size_t vectors) {
    bool masked = kMasked;  // of the first vector only
    while (j < vectors) {
      const size_t count = std::min<size_t>(kScoreVectors, vectors - j);
      const auto go = [&](auto number) HWY_ATTR {
        constexpr int kVectors = decltype(number)::value;
        if (masked) {
          ScoreRows<kVectors, true>(key, end, n0, j);
        } else {
          ScoreRows<kVectors, false>(key, end, n0, j);
        }
      };
      switch (count) {
        case 1:
          go(std::integral_constant<int, 1>());
          break;
        case 2:
          go(std::integral_constant<int, std::min(2, kScoreVectors)>());
          break;
        case 3:
          go(std::integral_constant<int, std::min(3, kScoreVectors)>());
          break;
        default:
          go(std::integral_constant<int, std::min(4, kScoreVectors)>());
      }
      j += count;
      masked = false;
    }
  }

  template <int kVectors, bool kMasked>
  HWY_NOINLINE HWY_ATTR void ScoreRows(size_t key, size_t end, size_t n0, size_t j) {
    // Fewer vectors, more keys: enough independent sums to hide the latency.
    constexpr int kMost = 2 * kVectors <= kScoreVectors ? 2 * kScoreRows : kScoreRows;
    for (; key + kMost <= end; key += kMost) ScoreKeys<kMost, kVectors, kMasked>(key, n0, j);
    if constexpr (kMost > 8) {
      if (key + 8 <= end) ScoreKeys<8, kVectors, kMasked>(key, n0, j), key += 8;
    }
    if constexpr (kMost > 4) {
      if (key + 4 <= end) ScoreKeys<4, kVectors, kMasked>(key, n0, j), key += 4;
    }
    if (key + 2 <= end) ScoreKeys<2, kVectors, kMasked>(key, n0, j), key += 2;
    if (key < end) ScoreKeys<1, kVectors, kMasked>(key, n0, j);
  }

  template <int kRows, int kVectors, bool kMasked>
  HWY_INLINE void ScoreKeys(size_t key, size_t n0, size_t j) {
    const DF d;
    FetchAhead();
    float* s = s_ + (key - n0) * kQueries + j * kLanes;
    float* greatest = greatest_ + j * kLanes;
    VF most[kVectors];
    ATTN_UNROLL for (int c = 0; c < kVectors; ++c) most[c] = hn::Load(d, greatest + c * kLanes);
    ScoreTile<kRows, kVectors>(
        k_ + key * k_row_, k_row_, qt_ + j * kLanes, depth_, [&](int i, int c, VF score) HWY_ATTR {
          if (kMasked && c == 0) {
            score = hn::IfThenElse(Sees(lane_limits_ + j * kLanes, key + i), score,
                                   hn::Set(d, -std::numeric_limits<float>::infinity()));
          }
          hn::Store(score, d, s + i * kQueries + c * kLanes);
          most[c] = hn::Max(score, most[c]);
        });
    ATTN_UNROLL for (int c = 0; c < kVectors; ++c) hn::Store(most[c], d, greatest + c * kLanes);
  }

  // Scores to weights: s = 2^(s - greatest), and their running total.
  HWY_ATTR void Exponentials(size_t n0, size_t n1, size_t rows, size_t vectors, uint32_t q0) {
    const DF d;
    for (size_t j = 0; j < vectors; ++j) {
      const bool partial = (j + 1) * kLanes > rows;
      const size_t end = std::min(PartEnd(j, rows), n1);
      const size_t full = partial ? n0 : std::clamp(FullEnd(j), n0, std::max(n0, end));
      // -inf only where nothing was seen yet (or every score is -inf): any finite number does, exp2
      // gives 0.
      const VF most = hn::Load(d, greatest_ + j * kLanes);
      const VF base = hn::IfThenElse(
          hn::Eq(most, hn::Set(d, -std::numeric_limits<float>::infinity())), hn::Zero(d), most);
      VF total = hn::Load(d, total_ + j * kLanes);
      if (n0 > 0) {
        const VF rescale = Exp2(hn::Sub(hn::Load(d, base_ + j * kLanes), base));
        hn::Store(rescale, d, rescale_ + j * kLanes);
        total = hn::Mul(total, rescale);
      }
      hn::Store(base, d, base_ + j * kLanes);
      if (dropout() && end > n0) {
        DropoutFactors(philox_, head_number_, q0 + static_cast<uint32_t>(j * kLanes),
                       static_cast<uint32_t>(n0), static_cast<uint32_t>(end),
                       factors_ + j * kLanes);
      }
      float* s = s_ + j * kLanes;
      size_t key = n0;
      for (; key < full; ++key, s += kQueries) {
        const VF weight = Exp2(hn::Sub(hn::Load(d, s), base));
        total = hn::Add(total, weight);
        hn::Store(weight, d, s);
      }
      for (; key < end; ++key, s += kQueries) {
        const VF weight = hn::IfThenElseZero(Sees(lane_limits_ + j * kLanes, key),
                                             Exp2(hn::Sub(hn::Load(d, s), base)));
        total = hn::Add(total, weight);
        hn::Store(weight, d, s);
      }
      if (dropout()) {
        s = s_ + j * kLanes;
        const float* factor = factors_ + j * kLanes;
        for (key = n0; key < end; ++key, s += kQueries, factor += kQueries) {
          hn::Store(hn::Mul(hn::Load(d, s), hn::Load(d, factor)), d, s);
        }
      }
      hn::Store(total, d, total_ + j * kLanes);
    }
  }

  // o = o * rescale + weights · v; the last block divides by the total and writes the output rows.
  HWY_ATTR void WeightedSum(size_t n0, size_t n1, size_t rows, bool first, bool last, T* out) {
    const size_t out_row = static_cast<size_t>(plan_.arguments->out.strides.row);
    float* to = o_;
    size_t to_row = width_;
    if constexpr (sizeof(T) == sizeof(float)) {
      if (last && width_ == depth_) {
        to = out;
        to_row = out_row;
      }
    }
    if (last) {
      const DF d;
      for (size_t i = 0; i < rows; i += kLanes) {
        const MF some = hn::Gt(hn::Load(d, lane_limits_ + i), hn::Zero(d));
        const VF inverse = hn::Div(hn::Set(d, 1.0F), hn::Load(d, total_ + i));
        hn::Store(hn::IfThenElseZero(some, inverse), d, inverse_ + i);
      }
    }
    const SumBlock block = {n0, n1, rows, first, last, to, to_row};
    size_t x = 0;
    for (; x + kSumVectors * kLanes <= width_; x += kSumVectors * kLanes)
      SumRows<kSumVectors>(block, x);
    if constexpr (kSumVectors > 2) {
      for (; x + 2 * kLanes <= width_; x += 2 * kLanes) SumRows<2>(block, x);
    }
    if constexpr (kSumVectors > 1) {
      for (; x < width_; x += kLanes) SumRows<1>(block, x);
    }
    if (last && to == o_) {
      for (size_t i = 0; i < rows; ++i) WriteRow(o_ + i * width_, depth_, 1.0F, out + i * out_row);
    }
  }

  struct SumBlock {
    size_t n0, n1, rows;
    bool first, last;
    float* to;
    size_t to_row;
  };

  template <int kVectors>
  HWY_NOINLINE HWY_ATTR void SumRows(const SumBlock& block, size_t x) {
    constexpr int kMost = kVectors <= 2 && kVectors < kSumVectors ? 2 * kSumRows : kSumRows;
    size_t r = 0;
    for (; r + kMost <= block.rows; r += kMost) SumTileAt<kMost, kVectors>(block, r, x);
    if constexpr (kMost > 6) {
      if (r + 6 <= block.rows) SumTileAt<6, kVectors>(block, r, x), r += 6;
    }
    if constexpr (kMost > 4) {
      if (r + 4 <= block.rows) SumTileAt<4, kVectors>(block, r, x), r += 4;
    }
    if (r + 2 <= block.rows) SumTileAt<2, kVectors>(block, r, x), r += 2;
    if (r + 2 <= block.rows) SumTileAt<2, kVectors>(block, r, x), r += 2;
    if (r < block.rows) SumTileAt<1, kVectors>(block, r, x);
  }

  template <int kRows, int kVectors>
  HWY_INLINE void SumTileAt(const SumBlock& block, size_t r, size_t x) {
    const DF d;
    FetchAhead();
    static constexpr int32_t kFromStart[2 * kSumRows] = {};
    const auto n0 = static_cast<int32_t>(block.n0);
    // Weights lie at [key - n0]; limits count from key 0.
    SumTile<kRows, kVectors, 1, kQueries>(
        s_ + r - static_cast<ptrdiff_t>(n0) * kQueries, v_ + x, v_row_, {kFromStart, limits_ + r},
        n0, static_cast<int32_t>(block.n1),
        [&](int i, int c) HWY_ATTR {
          if (block.first) return hn::Zero(d);
          return hn::Mul(hn::Set(d, rescale_[r + i]),
                         hn::LoadU(d, o_ + (r + i) * width_ + x + c * kLanes));
        },
        [&](int i, int c, VF sum) HWY_ATTR {
          if (block.last) sum = hn::Mul(sum, hn::Set(d, inverse_[r + i]));
          hn::StoreU(sum, d, block.to + (r + i) * block.to_row + x + c * kLanes);
        });
  }

  const ForwardPlan<T>& plan_;
  const Problem& problem_;
  const size_t depth_;  // D
  const size_t width_;  // D rounded up to whole vectors
  const Philox philox_;
  bool pack_k_;
  bool pack_v_;
  // Scratch: what fits lies on the stack; an allocation costs a small call a tenth of its time.
  static constexpr size_t kSmall = 4096;
  HWY_ALIGN float small_[kSmall];
  float* allocated_ = nullptr;
  float* qt_;
  float* s_;
  float* o_;
  float* factors_;
  float* packed_k_;
  float* packed_v_;
  int32_t* indices_;

  struct Ahead {
    const char* next = nullptr;
    int64_t row = 0;  // stride in bytes
    int64_t rows = 0;
  };
  Ahead ahead_[3];
  int ahead_part_ = 3;
  int ahead_rows_ = 0;

  // Of the head at hand
  const float* k_ = nullptr;
  const float* v_ = nullptr;
  size_t k_row_ = 0;
  size_t v_row_ = 0;
  uint32_t head_number_ = 0;

  // Of the queries at hand, one a lane
  int32_t limits_[kQueries];
  HWY_ALIGN float lane_limits_[kQueries];
  HWY_ALIGN float greatest_[kQueries];
  HWY_ALIGN float base_[kQueries];  // what is subtracted: `greatest_`, or 0 for -inf
  HWY_ALIGN float total_[kQueries];
  HWY_ALIGN float log_total_[kQueries];
  HWY_ALIGN float rescale_[kQueries];
  HWY_ALIGN float inverse_[kQueries];
};

}  // namespace attn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard
