// Register tiles that every attention kernel is made of, per instruction set (Highway).
//
// All products run over 2-D tiles "rows x vectors": one operand is read by broadcast (a row of the
// tile each), the other by whole vectors, and kRows x kVectors sums stay in registers over the
// whole depth. Queries lie in lanes, [key][query], so softmax needs no sums across lanes, and only
// Q (and dO) are ever transposed.
//
//            32 registers (AVX-512, NEON)   16 registers (AVX2, SSE4)
//   scores   8 keys x 3 query vectors       4 x 3
//   sums     6 rows x 4 width vectors       6 x 2
//   (24 + 3 + 1 and 24 + 4 + 1, 12 + 3 + 1 and 12 + 2 + 1 registers: nothing spills)

#if defined(ATTN_KERNELS_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTN_KERNELS_TILE_INL_H_
#undef ATTN_KERNELS_TILE_INL_H_
#else
#define ATTN_KERNELS_TILE_INL_H_
#endif

#include "attention.h"

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace attn::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using MF = hn::Mask<DF>;

constexpr int kLanes = HWY_LANES(float);
#if HWY_TARGET == HWY_SCALAR
constexpr int kScoreRows = 4, kScoreVectors = 4, kSumRows = 4, kSumVectors = 1;
#elif HWY_CAP_GE512 || HWY_TARGET == HWY_NEON
constexpr int kScoreRows = 8, kScoreVectors = 3, kSumRows = 6, kSumVectors = 4;
#else
constexpr int kScoreRows = 4, kScoreVectors = 3, kSumRows = 6, kSumVectors = 2;
#endif

/// Queries in a block: lanes side by side in a score tile's row. 3 vectors of AVX-512, 6 of AVX2.
constexpr int kQueries = 48;

#if HWY_COMPILER_CLANG
#define ATTN_UNROLL _Pragma("clang loop unroll(full)")
#define ATTN_NO_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define ATTN_UNROLL _Pragma("GCC unroll 32")
#define ATTN_NO_UNROLL _Pragma("GCC unroll 1")
#endif

HWY_INLINE float ToFloat(float x) {
  return x;
}
HWY_INLINE float ToFloat(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
HWY_INLINE void FromFloat(float value, float& to) {
  to = value;
}
HWY_INLINE void FromFloat(float value, BFloat16& to) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  to.bits = static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? 0x7FC0U : rounded);
}

HWY_INLINE size_t RoundUp(size_t n, size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// 2^x for x <= 0, exactly 0 from -127 down; NaN stays. Minimax polynomial of degree 6 on [-1/2,
/// 1/2], relative error below 2e-7.
HWY_INLINE VF Exp2(VF x) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  x = hn::Max(hn::Set(d, -127.0F), x);
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const VF magic = hn::Set(d, 12582912.0F);
  const VF shifted = hn::Add(x, magic);
  const VF r = hn::Sub(x, hn::Sub(shifted, magic));
  VF p = hn::Set(d, 1.535336188319500e-4F);
  p = hn::MulAdd(p, r, hn::Set(d, 1.339887440266574e-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 9.618437357674640e-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 5.550332471162809e-2F));
  p = hn::MulAdd(p, r, hn::Set(d, 2.402264791363012e-1F));
  p = hn::MulAdd(p, r, hn::Set(d, 6.931472028550421e-1F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

/// Lanes of the query vector at `limits` that see key `key`.
HWY_INLINE MF Sees(const float* HWY_RESTRICT limits, size_t key) {
  const DF d;
  return hn::Gt(hn::Load(d, limits), hn::Set(d, static_cast<float>(key)));
}

/// The first `count` lanes from memory, zeros in the others; nothing past them is read.
HWY_INLINE VF LoadFirst(const float* HWY_RESTRICT from, size_t count) {
  const DF d;
#if HWY_MEM_OPS_MIGHT_FAULT
  HWY_ALIGN float lanes[kLanes] = {};
  std::memcpy(lanes, from, count * sizeof(float));
  return hn::Load(d, lanes);
#else
  return hn::MaskedLoad(hn::FirstN(d, count), d, from);
#endif
}
HWY_INLINE void StoreFirst(VF v, size_t count, float* HWY_RESTRICT to) {
  const DF d;
#if HWY_MEM_OPS_MIGHT_FAULT
  HWY_ALIGN float lanes[kLanes];
  hn::Store(v, d, lanes);
  std::memcpy(to, lanes, count * sizeof(float));
#else
  hn::BlendedStore(v, hn::FirstN(d, count), d, to);
#endif
}

/// A row as float: `width` elements, then zeros up to `stride`. Rows are packed in order: a float
/// row is stored in whole vectors, whose last may reach into the next.
template <typename T>
HWY_INLINE void PackRow(const T* HWY_RESTRICT source, size_t width, float* HWY_RESTRICT to,
                        size_t stride) {
  for (size_t x = 0; x < width; ++x) to[x] = ToFloat(source[x]);
  for (size_t x = width; x < stride; ++x) to[x] = 0.0F;
}
HWY_INLINE void PackRow(const float* HWY_RESTRICT source, size_t width, float* HWY_RESTRICT to,
                        size_t /*stride*/) {
  const DF d;
  size_t x = 0;
  for (; x + kLanes <= width; x += kLanes) hn::StoreU(hn::LoadU(d, source + x), d, to + x);
  if (x < width) hn::StoreU(LoadFirst(source + x, width - x), d, to + x);
}

/// to[x] = from[x] * factor, rounded to T.
template <typename T>
HWY_INLINE void WriteRow(const float* HWY_RESTRICT from, size_t width, float factor,
                         T* HWY_RESTRICT to) {
  for (size_t x = 0; x < width; ++x) FromFloat(from[x] * factor, to[x]);
}
HWY_INLINE void WriteRow(const float* HWY_RESTRICT from, size_t width, float factor,
                         float* HWY_RESTRICT to) {
  const DF d;
  const VF f = hn::Set(d, factor);
  size_t x = 0;
  for (; x + kLanes <= width; x += kLanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, from + x), f), d, to + x);
  if (x < width) StoreFirst(hn::Mul(hn::LoadU(d, from + x), f), width - x, to + x);
}

#if HWY_TARGET != HWY_SCALAR
// Block b of the result holds 4 floats of row 4b + i.
HWY_INLINE VF Gather4(const float* const* rows, int i, size_t x) {
  const hn::Full128<float> d4;
#if HWY_CAP_GE512
  const hn::Full256<float> d8;
  const DF d;
  return hn::Combine(
      d, hn::Combine(d8, hn::LoadU(d4, rows[12 + i] + x), hn::LoadU(d4, rows[8 + i] + x)),
      hn::Combine(d8, hn::LoadU(d4, rows[4 + i] + x), hn::LoadU(d4, rows[i] + x)));
#elif HWY_CAP_GE256
  const DF d;
  return hn::Combine(d, hn::LoadU(d4, rows[4 + i] + x), hn::LoadU(d4, rows[i] + x));
#else
  return hn::LoadU(d4, rows[i] + x);
#endif
}
#endif

/// Transposes up to kLanes rows of width `width` into one vector a column: to[x * kQueries + lane],
/// times `factor`. Lanes past `count` get zeros.
template <typename T>
HWY_INLINE void PackColumns(const T* source, size_t row_stride, size_t count, size_t width,
                            float factor, float* to) {
  size_t x0 = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == sizeof(float)) {
    if (count > 0) {
      const DF d;
      const hn::RepartitionToWide<DF> dw;
      const VF f = hn::Set(d, factor);
      const MF live = hn::FirstN(d, count);
      const float* rows[kLanes];
      for (size_t i = 0; i < kLanes; ++i) rows[i] = source + std::min(i, count - 1) * row_stride;
      for (; x0 + 4 <= width; x0 += 4) {
        const VF r0 = Gather4(rows, 0, x0), r1 = Gather4(rows, 1, x0), r2 = Gather4(rows, 2, x0),
                 r3 = Gather4(rows, 3, x0);
        const auto t0 = hn::BitCast(dw, hn::InterleaveLower(d, r0, r1)),
                   t1 = hn::BitCast(dw, hn::InterleaveUpper(d, r0, r1));
        const auto t2 = hn::BitCast(dw, hn::InterleaveLower(d, r2, r3)),
                   t3 = hn::BitCast(dw, hn::InterleaveUpper(d, r2, r3));
        const auto store = [&](auto v, size_t x) HWY_ATTR {
          hn::Store(hn::IfThenElseZero(live, hn::Mul(f, hn::BitCast(d, v))), d, to + x * kQueries);
        };
        store(hn::InterleaveLower(dw, t0, t2), x0 + 0);
        store(hn::InterleaveUpper(dw, t0, t2), x0 + 1);
        store(hn::InterleaveLower(dw, t1, t3), x0 + 2);
        store(hn::InterleaveUpper(dw, t1, t3), x0 + 3);
      }
    }
  }
#endif
  for (size_t i = 0; i < kLanes; ++i) {
    for (size_t x = x0; x < width; ++x)
      to[x * kQueries + i] = i < count ? ToFloat(source[i * row_stride + x]) * factor : 0.0F;
  }
}

/// Score tile: kRows rows of `a` (stride a_row, contiguous over the depth) times kVectors vectors
/// of `b` (rows kQueries apart). `finish(row, vector, sum)` takes each sum.
template <int kRows, int kVectors, class Finish>
HWY_INLINE void ScoreTile(const float* HWY_RESTRICT a, size_t a_row, const float* HWY_RESTRICT b,
                          size_t depth, const Finish& finish) {
  const DF d;
  VF sum[kRows][kVectors];
  ATTN_UNROLL for (int i = 0; i < kRows; ++i) {
    ATTN_UNROLL for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Zero(d);
  }
  ATTN_NO_UNROLL for (size_t x = 0; x < depth; ++x) {
    VF columns[kVectors];
    ATTN_UNROLL for (int j = 0; j < kVectors; ++j) columns[j] =
        hn::Load(d, b + x * kQueries + j * kLanes);
    ATTN_UNROLL for (int i = 0; i < kRows; ++i) {
      const VF row = hn::Set(d, a[i * a_row + x]);
      ATTN_UNROLL for (int j = 0; j < kVectors; ++j) sum[i][j] =
          hn::MulAdd(row, columns[j], sum[i][j]);
    }
  }
  ATTN_UNROLL for (int j = 0; j < kVectors; ++j) {
    ATTN_UNROLL for (int i = 0; i < kRows; ++i) finish(i, j, sum[i][j]);
  }
}

/// Which part of the depth each row of a sum tile takes: [begin[r], end[r]), both nondecreasing.
/// What a row may not see is skipped or selected away, never multiplied by 0, so its NaN stays out.
struct DepthRange {
  const int32_t* begin;
  const int32_t* end;
};

/// Sum tile: to[r][:] = start + sum over depth of a[r * kARow + k * kADepth] * b[k][:], kVectors
/// vectors wide. `first` and `last` clip the depth. `load(r, c)` gives the start, `store(r, c,
/// sum)` takes the result.
template <int kRows, int kVectors, int kARow, int kADepth, class Load, class Store>
HWY_INLINE void SumTile(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, size_t b_row,
                        const DepthRange& range, int32_t first, int32_t last, const Load& load,
                        const Store& store) {
  const DF d;
  VF sum[kRows][kVectors];
  ATTN_UNROLL for (int i = 0; i < kRows; ++i) {
    ATTN_UNROLL for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Zero(d);
  }
  // Common to all rows: [latest begin, earliest end).
  const int32_t common_begin = std::clamp(range.begin[kRows - 1], first, last);
  const int32_t common_end = std::clamp(range.end[0], common_begin, last);
  const auto fringe = [&](int32_t k) HWY_ATTR {
    VF columns[kVectors];
    ATTN_UNROLL for (int j = 0; j < kVectors; ++j) columns[j] =
        hn::LoadU(d, b + k * b_row + j * kLanes);
    ATTN_UNROLL for (int i = 0; i < kRows; ++i) {
      const MF seen = hn::FirstN(d, range.begin[i] <= k && k < range.end[i] ? kLanes : 0);
      const VF row = hn::Set(d, a[i * kARow + k * kADepth]);
      ATTN_UNROLL for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = hn::IfThenElse(seen, hn::MulAdd(row, columns[j], sum[i][j]), sum[i][j]);
      }
    }
  };
  for (int32_t k = std::max(range.begin[0], first); k < common_begin; ++k) fringe(k);
  const float* HWY_RESTRICT column = b + common_begin * b_row;
  const float* HWY_RESTRICT weight = a + common_begin * kADepth;
  ATTN_NO_UNROLL for (int32_t k = common_begin; k < common_end; ++k) {
    VF columns[kVectors];
    ATTN_UNROLL for (int j = 0; j < kVectors; ++j) columns[j] = hn::LoadU(d, column + j * kLanes);
    ATTN_UNROLL for (int i = 0; i < kRows; ++i) {
      const VF row = hn::Set(d, weight[i * kARow]);
      ATTN_UNROLL for (int j = 0; j < kVectors; ++j) sum[i][j] =
          hn::MulAdd(row, columns[j], sum[i][j]);
    }
    column += b_row;
    weight += kADepth;
  }
  for (int32_t k = common_end; k < std::min(range.end[kRows - 1], last); ++k) fringe(k);
  ATTN_UNROLL for (int i = 0; i < kRows; ++i) {
    ATTN_UNROLL for (int j = 0; j < kVectors; ++j) store(i, j, hn::Add(load(i, j), sum[i][j]));
  }
}

/// Philox4x32-10 (Salmon et al. 2011) over queries in lanes: four random words for keys 4g .. 4g +
/// 3 each.
struct Philox {
  uint64_t keys[10][2];
  uint32_t threshold;  ///< of 31 random bits: a weight is kept from there on
  float factor;        ///< of a kept weight

  explicit Philox(const Problem& problem) {
    auto a = static_cast<uint32_t>(problem.dropout_seed);
    auto b = static_cast<uint32_t>(problem.dropout_seed >> 32);
    for (auto& key : keys) {
      key[0] = a;
      key[1] = b;
      a += 0x9E3779B9U;
      b += 0xBB67AE85U;
    }
    threshold = static_cast<uint32_t>(
        std::min(2147483647.0, static_cast<double>(problem.dropout_p) * 2147483648.0));
    factor = problem.dropout_p < 1.0F ? 1.0F / (1.0F - problem.dropout_p) : 0.0F;
  }
};

#if HWY_TARGET != HWY_SCALAR
/// factors[key * kQueries + lane] of one query vector: `philox.factor` where kept, 0 where dropped,
/// for keys [key_begin, key_end); key_begin is a multiple of 4 and up to 3 keys past the end are
/// written.
HWY_INLINE void DropoutFactors(const Philox& philox, uint32_t head, uint32_t query,
                               uint32_t key_begin, uint32_t key_end, float* HWY_RESTRICT factors) {
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  const hn::RebindToSigned<DF> di;
  const hn::RepartitionToWide<decltype(du)> dw;  // products, and counters in the low halves
  using VW = hn::Vec<decltype(dw)>;
  const auto m0 = hn::Set(du, 0xD2511F53U);
  const auto m1 = hn::Set(du, 0xCD9E8D57U);
  const auto product = [&](VW x, decltype(m0) m)
                           HWY_ATTR { return hn::MulEven(hn::BitCast(du, x), m); };
  const VW even_query = hn::Add(hn::Set(dw, query), hn::Add(hn::Iota(dw, 0), hn::Iota(dw, 0)));
  for (uint32_t key = key_begin; key < key_end; key += 4) {
    VW c[2][4];  // even and odd lanes
    for (int half = 0; half < 2; ++half) {
      c[half][0] = hn::Add(even_query, hn::Set(dw, static_cast<uint64_t>(half)));
      c[half][1] = hn::Set(dw, key / 4);
      c[half][2] = hn::Set(dw, head);
      c[half][3] = hn::Zero(dw);
    }
    ATTN_UNROLL for (int round = 0; round < 10; ++round) {
      const VW k0 = hn::Set(dw, philox.keys[round][0]);
      const VW k1 = hn::Set(dw, philox.keys[round][1]);
      ATTN_UNROLL for (int half = 0; half < 2; ++half) {
        const VW p0 = product(c[half][0], m0);
        const VW p1 = product(c[half][2], m1);
        c[half][0] = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), c[half][1]), k0);
        c[half][2] = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), c[half][3]), k1);
        c[half][1] = p1;  // only the low half counts from here on
        c[half][3] = p0;
      }
    }
    ATTN_UNROLL for (int word = 0; word < 4; ++word) {
      const auto bits =
          hn::OddEven(hn::BitCast(du, hn::ShiftLeft<32>(c[1][word])), hn::BitCast(du, c[0][word]));
      const auto dropped = hn::Lt(hn::BitCast(di, hn::ShiftRight<1>(bits)),
                                  hn::Set(di, static_cast<int32_t>(philox.threshold)));
      const VF factor =
          hn::IfThenElse(hn::RebindMask(d, dropped), hn::Zero(d), hn::Set(d, philox.factor));
      hn::Store(factor, d, factors + (key - key_begin + word) * kQueries);
    }
  }
}
#else
HWY_INLINE void DropoutFactors(const Philox& philox, uint32_t head, uint32_t query,
                               uint32_t key_begin, uint32_t key_end, float* HWY_RESTRICT factors) {
  for (uint32_t key = key_begin; key < key_end; key += 4) {
    uint32_t c[4] = {query, key / 4, head, 0};
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = static_cast<uint64_t>(0xD2511F53U) * c[0];
      const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57U) * c[2];
      const uint32_t n0 =
          static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ static_cast<uint32_t>(philox.keys[round][0]);
      const uint32_t n2 =
          static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ static_cast<uint32_t>(philox.keys[round][1]);
      c[1] = static_cast<uint32_t>(p1);
      c[3] = static_cast<uint32_t>(p0);
      c[0] = n0;
      c[2] = n2;
    }
    for (int word = 0; word < 4; ++word) {
      factors[(key - key_begin + word) * kQueries] =
          (c[word] >> 1) < philox.threshold ? 0.0F : philox.factor;
    }
  }
}
#endif

}  // namespace attn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard
