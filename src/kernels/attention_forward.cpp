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

// Highway includes this file again from here, once per instruction set.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention_forward.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
#include "kernels/tile-inl.h"
// clang-format on

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

HWY_BEFORE_NAMESPACE();
namespace attn::kernels::HWY_NAMESPACE {
namespace {

constexpr size_t kKeys = 96;  // in a block; 64 to 192 are equally fast

template <typename T>
class Worker {
 public:
  Worker(const ForwardPlan<T>& plan)
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
    const size_t floats = depth_ * kQueries + kKeys * kQueries + kQueries * width_ +
                          (dropout() ? (kKeys + 4) * kQueries : 0) +
                          (pack_k_ ? RoundUp(S * depth_, 16) : 0) + (pack_v_ ? S * width_ : 0) +
                          (padded ? 2 * S + 2 : 0) + 64;
    memory_ = static_cast<float*>(plan.allocator->allocate(floats * sizeof(float)));
    float* next = memory_;
    const auto take = [&](size_t count) {
      float* taken = next;
      next += RoundUp(count, 16);
      return taken;
    };
    qt_ = take(depth_ * kQueries);
    s_ = take(kKeys * kQueries);
    o_ = take(kQueries * width_);
    factors_ = dropout() ? take((kKeys + 4) * kQueries) : nullptr;
    packed_k_ = pack_k_ ? take(S * depth_) : nullptr;
    packed_v_ = pack_v_ ? take(S * width_) : nullptr;
    indices_ = padded ? reinterpret_cast<int32_t*>(next) : nullptr;
  }
  ~Worker() { plan_.allocator->release(memory_); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  HWY_ATTR void Run(int index) {
    for (int64_t unit; (unit = plan_.dealer->take(index)) != plan_.dealer->none();) {
      const int64_t heads = problem_.B * problem_.H;
      const int64_t head = plan_.whole_heads ? unit : unit % heads;
      // Few heads: the longest blocks first.
      const int64_t only = plan_.query_blocks - 1 - unit / heads;
      const int64_t begin = plan_.whole_heads ? 0 : only;
      const int64_t end = plan_.whole_heads ? plan_.query_blocks : only + 1;
      Head(head / problem_.H, head % problem_.H, begin, end);
    }
  }

 private:
  bool dropout() const { return problem_.dropout_p > 0.0F; }

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
    for (size_t i = 0; i < rows; ++i) {
      limits_[i] = seen.limit(q0 + static_cast<int64_t>(i));
      lane_limits_[i] = static_cast<float>(limits_[i]);
    }
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
      for (size_t i = 0; i < rows; ++i) inverse_[i] = limits_[i] > 0 ? 1.0F / total_[i] : 0.0F;
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
      for (size_t i = 0; i < rows; ++i) {
        for (size_t c = 0; c < depth_; ++c) FromFloat(o_[i * width_ + c], out[i * out_row + c]);
      }
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
  float* memory_;
  float* qt_;
  float* s_;
  float* o_;
  float* factors_;
  float* packed_k_;
  float* packed_v_;
  int32_t* indices_;

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

template <typename T>
HWY_ATTR void Work(void* data, int index) {
  Worker<T>(*static_cast<const ForwardPlan<T>*>(data)).Run(index);
}

}  // namespace

void ForwardFloat(void* data, int index) {
  Work<float>(data, index);
}
void ForwardBFloat16(void* data, int index) {
  Work<BFloat16>(data, index);
}

}  // namespace attn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attn::kernels {

HWY_EXPORT(ForwardFloat);
HWY_EXPORT(ForwardBFloat16);

namespace {
constexpr int64_t kQueryBlock = 48;  // kQueries of tile-inl.h

// A parallel region costs about a microsecond to enter; below this much work (microseconds on one
// core, at a third of a core's peak) a single thread is faster.
constexpr double kSerialMicroseconds = 5.0;

double estimated_microseconds(const Problem& p) {
  const double pairs = static_cast<double>(p.T) * static_cast<double>(p.S) * (p.causal ? 0.5 : 1.0);
  const double heads = static_cast<double>(p.B * p.H);
  return heads * (0.1 + pairs * 4.0 * static_cast<double>(p.D + 8) / 40e3);
}
}  // namespace

template <typename T>
void attention_forward(const ForwardArguments<T>& arguments, const Parallel& parallel,
                       const Allocator& allocator) {
  const Problem& p = arguments.problem;
  if (p.B * p.H * p.T == 0) return;
  const bool serial = parallel.threads == 1 || estimated_microseconds(p) < kSerialMicroseconds;
  const int workers = serial ? 1 : parallel.threads;
  const int64_t blocks = (p.T + kQueryBlock - 1) / kQueryBlock;
  const bool whole_heads = workers == 1 || blocks == 1 || p.B * p.H >= 2 * workers;
  const int64_t units = p.B * p.H * (whole_heads ? 1 : blocks);
  Dealer dealer(units,
                whole_heads ? workers : 1);  // blocks differ in length: one queue, longest first
  ForwardPlan<T> plan{&arguments, &allocator, &dealer, blocks, whole_heads};
  const auto work = sizeof(T) == sizeof(float) ? HWY_DYNAMIC_DISPATCH(ForwardFloat)
                                               : HWY_DYNAMIC_DISPATCH(ForwardBFloat16);
  if (workers == 1) {
    work(&plan, 0);
  } else {
    parallel.run(workers, work, &plan);
  }
}

template void attention_forward(const ForwardArguments<float>&, const Parallel&, const Allocator&);
template void attention_forward(const ForwardArguments<BFloat16>&, const Parallel&,
                                const Allocator&);

}  // namespace attn::kernels
#endif
