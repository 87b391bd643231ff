// Attention forward in bfloat16 on AMX tiles, with online softmax as in forward-inl.h.
//
// A tile product is C [16][16] += A [16][32] B [32][16], where B holds pairs: row p has elements 2p
// and 2p + 1 of each column side by side. Scores are computed transposed, so that nothing but Q has
// to be brought into pairs by a transposition, and queries lie in lanes for the softmax:
//
//   Sᵀ [keys][32] = K Qᵀ      A = rows of K             B = Q in pairs, once for 32 queries
//   Oᵀ [D][32]   += Vᵀ Pᵀ     A = V transposed          B = weights, two keys to a pair
//
// Blocking: 32 queries against 128 keys: Sᵀ is 16 KiB and P 8 KiB. Of the eight tiles four are sums
// (2 x 2) and two each A and B, so that a loaded tile is used twice. K and V are packed once a
// head, keys rounded up to 32 and widths to 32 and 16 with zeros. Where heads are few they are
// packed for all threads first.
//
// Units write disjoint rows of the output, and a unit's arithmetic does not depend on who runs it:
// results are bit-equal for any number of threads.

#include "kernels/amx_forward.h"

#include "kernels/schedule.h"
#include "kernels/visibility.h"

#if defined(__x86_64__) && defined(__linux__) && \
    ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#define ATTN_KERNELS_HAVE_AMX 1
#endif

#ifdef ATTN_KERNELS_HAVE_AMX
#include <hwy/base.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cpuid.h>
#include <cstring>
#include <immintrin.h>
#include <limits>
#include <memory>
#include <sys/syscall.h>
#include <unistd.h>

namespace attn::kernels {
namespace {

constexpr int64_t kQueries = 32;  // in a block: two tiles
constexpr int64_t kKeys = 128;    // in a block; 96 to 256 are equally fast
constexpr int64_t kLanes = 16;    // rows and 32-bit columns of a tile
constexpr int64_t kPairs = 32;    // depth of a tile product
constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool cpu_has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || (c & (1U << 27)) == 0) return false;  // OSXSAVE
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool avx512 = (b & (1U << 16)) != 0 && (b & (1U << 17)) != 0 && (b & (1U << 30)) != 0 &&
                      (b & (1U << 31)) != 0;                        // F, DQ, BW, VL
  const bool amx = (d & (1U << 22)) != 0 && (d & (1U << 24)) != 0;  // bfloat16, tiles
  if (!avx512 || !amx) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & (1U << 5)) == 0)
    return false;  // AVX512_BF16
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kStates =
      0x600E6;  // SSE, AVX, the three of AVX-512, tile configuration, tiles
  return (low & kStates) == kStates;
}

// Linux hands out the tiles' 8 KiB of state on request only, to all threads at once.
bool kernel_grants_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

/// Sizes of one head's packed keys and values.
struct Layout {
  explicit Layout(const Problem& p)
      : key_width(round_up(p.D, kPairs)),
        value_width(round_up(p.D, kLanes)),
        keys(round_up(p.S, kPairs)) {}

  int64_t key_width;    ///< D, in tile depths
  int64_t value_width;  ///< D, in tile rows
  int64_t keys;         ///< S, in tile depths

  int64_t packed_keys() const { return keys * key_width; }      ///< [keys][key_width]
  int64_t packed_values() const { return keys * value_width; }  ///< [keys / 32][value_width][32]
  int64_t packed() const { return packed_keys() + packed_values(); }
};

struct Plan {
  const ForwardArguments<BFloat16>* arguments;
  const Allocator* allocator;
  Dealer* dealer;
  Layout layout;
  BFloat16* shared;           ///< [B, Hkv] packed heads, or null: each worker packs for itself
  int64_t blocks;             ///< units a head is split into, of kUnitQueries
  std::atomic<bool>* finite;  ///< no input that was looked at is infinite or NaN
};

constexpr int64_t kUnitQueries = 2 * kQueries;  // of a unit where heads are few
constexpr int64_t kUnitKeys = 256;              // of a unit that packs for all

}  // namespace
}  // namespace attn::kernels

// clang-format off
HWY_PUSH_ATTRIBUTES("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,amx-tile,amx-bf16")
// clang-format on
namespace attn::kernels {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Rows become columns, elements of 32 bits.
inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // 128-bit quarters: r[i] of rows 0-3, r[4 + i] of rows 4-7, ...
    const __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    const __m512i e = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
    t[i] = _mm512_shuffle_i32x4(a, b, 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(a, b, 0xDD);
    t[4 + i] = _mm512_shuffle_i32x4(c, e, 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(c, e, 0xDD);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// 2^x for x <= 0 (and a little above), relative error 2e-7: Taylor's series about the nearest whole
// number, |fraction| <= 1/2.
inline __m512 exp2(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-150.0F));
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.5403530e-4F);  // ln(2)^6 / 6!
  for (const float c :
       {1.3333558e-3F, 9.6181291e-3F, 5.5504109e-2F, 2.4022651e-1F, 6.9314718e-1F, 1.0F})
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, whole);
}

/// Gathers whether every element that it was shown is finite.
class FiniteCheck {
 public:
  void see(__m512i x) {
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    bad_ |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
  }
  bool ok() const { return bad_ == 0; }

 private:
  __mmask32 bad_ = 0;
};

// The first `count` (of up to 32) elements.
inline __m512i load(const BFloat16* from, int64_t count) {
  const auto mask = static_cast<__mmask32>(count >= 32 ? ~0U : (1U << count) - 1U);
  return _mm512_maskz_loadu_epi16(mask, from);
}

// Keys begin .. end - 1 of one head, as Layout says; begin is a multiple of 32. The last keys' tile
// is filled up with zeros.
bool pack(const Plan& plan, const Visibility& seen, int64_t b, int64_t kv_head, int64_t begin,
          int64_t end, BFloat16* to) {
  const auto& a = *plan.arguments;
  const Layout& layout = plan.layout;
  const int64_t D = a.problem.D, keys = seen.keys();
  const BFloat16* k = a.k.at(b, kv_head);
  const BFloat16* v = a.v.at(b, kv_head);
  FiniteCheck finite;
  for (int64_t n = begin; n < end; ++n) {
    BFloat16* row = to + n * layout.key_width;
    for (int64_t x = 0; x < layout.key_width; x += 32) {
      const __m512i part = n < keys ? load(k + seen.position(n) * a.k.strides.row + x, D - x)
                                    : _mm512_setzero_si512();
      finite.see(part);
      _mm512_storeu_si512(row + x, part);
    }
  }
  BFloat16* values = to + layout.packed_keys();
  for (int64_t n = begin; n < end; n += kPairs) {
    for (int64_t x = 0; x < layout.value_width; x += kLanes) {
      const auto wide = [&](int64_t i) {  // elements x .. x + 15 of value i, each in 32 bits
        if (i >= keys) return _mm512_setzero_si512();
        const __m512i row =
            load(v + seen.position(i) * a.v.strides.row + x, std::min<int64_t>(D - x, 16));
        finite.see(row);
        return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(row));
      };
      __m512i pairs[16];
      for (int64_t p = 0; p < 16; ++p)
        pairs[p] = _mm512_or_si512(wide(n + 2 * p), _mm512_slli_epi32(wide(n + 2 * p + 1), 16));
      transpose(pairs);
      BFloat16* tile = values + n * layout.value_width + x * kPairs;
      for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(tile + i * kPairs, pairs[i]);
    }
  }
  return finite.ok();
}

class Worker {
 public:
  explicit Worker(const Plan& plan)
      : plan_(plan),
        problem_(plan.arguments->problem),
        layout_(plan.layout),
        scale_(problem_.scale * 1.44269504F) {
    const bool padded = problem_.key_padding != nullptr;
    const uint64_t sizes[] = {
        static_cast<uint64_t>(kKeys * kQueries) * sizeof(float),                 // Sᵀ
        static_cast<uint64_t>(kKeys * kQueries) * sizeof(BFloat16),              // weights
        static_cast<uint64_t>(layout_.key_width * kQueries) * sizeof(BFloat16),  // Q in pairs
        static_cast<uint64_t>(layout_.value_width * kQueries) * sizeof(float),   // Oᵀ
        plan.shared != nullptr ? 0 : static_cast<uint64_t>(layout_.packed()) * sizeof(BFloat16),
        padded ? static_cast<uint64_t>(2 * problem_.S + 2) * sizeof(int32_t) : 0,
    };
    uint64_t bytes = 0;
    for (const uint64_t size : sizes) bytes += (size + 63) / 64 * 64;
    memory_ = static_cast<char*>(plan.allocator->allocate(bytes));
    char* next = memory_;
    size_t i = 0;
    const auto take = [&] {
      char* part = next;
      next += (sizes[i++] + 63) / 64 * 64;
      return part;
    };
    scores_ = reinterpret_cast<float*>(take());
    weights_ = reinterpret_cast<BFloat16*>(take());
    query_ = reinterpret_cast<BFloat16*>(take());
    out_ = reinterpret_cast<float*>(take());
    packed_ = reinterpret_cast<BFloat16*>(take());
    indices_ = padded ? reinterpret_cast<int32_t*>(take()) : nullptr;
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~Worker() {
    _tile_release();
    plan_.allocator->release(memory_);
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void pack_for_all(int index) {
    const int64_t parts = (layout_.keys + kUnitKeys - 1) / kUnitKeys;
    for (int64_t unit; (unit = plan_.dealer->take(index)) != plan_.dealer->none();) {
      const int64_t head = unit / parts, begin = unit % parts * kUnitKeys;
      const int64_t b = head / problem_.Hkv;
      const Visibility seen(problem_, b, indices_, indices_ + problem_.S + 1);
      if (!pack(plan_, seen, b, head % problem_.Hkv, begin,
                std::min(begin + kUnitKeys, layout_.keys), plan_.shared + head * layout_.packed()))
        plan_.finite->store(false, std::memory_order_relaxed);
    }
  }

  void run(int index) {
    const int64_t heads = problem_.B * problem_.H;
    int64_t packed_head = -1;
    for (int64_t unit; (unit = plan_.dealer->take(index)) != plan_.dealer->none();) {
      if (!plan_.finite->load(std::memory_order_relaxed)) return;
      const bool whole = plan_.shared == nullptr;
      const int64_t head = whole ? unit : unit % heads;
      const int64_t b = head / problem_.H, h = head % problem_.H;
      const int64_t kv_head = h / (problem_.H / problem_.Hkv);
      const int64_t number = b * problem_.Hkv + kv_head;
      const Visibility seen(problem_, b, indices_, indices_ + problem_.S + 1);
      if (whole && packed_head != number) {
        if (!pack(plan_, seen, b, kv_head, 0, layout_.keys, packed_))
          plan_.finite->store(false, std::memory_order_relaxed);
        packed_head = number;
      }
      keys_ = whole ? packed_ : plan_.shared + number * layout_.packed();
      values_ = keys_ + layout_.packed_keys();
      // Few heads: the longest blocks first.
      const int64_t first = whole ? 0 : (plan_.blocks - 1 - unit / heads) * kUnitQueries;
      const int64_t end = whole ? problem_.T : std::min(first + kUnitQueries, problem_.T);
      for (int64_t q0 = first; q0 < end; q0 += kQueries) block(b, h, q0, seen);
    }
  }

 private:
  // Queries q0 .. q0 + 31 of one head.
  void block(int64_t b, int64_t h, int64_t q0, const Visibility& seen) {
    const auto& a = *plan_.arguments;
    const int64_t rows = std::min(kQueries, problem_.T - q0);
    if (!pack_queries(a.q.at(b, h) + q0 * a.q.strides.row, rows))
      plan_.finite->store(false, std::memory_order_relaxed);
    seen.limits(q0, static_cast<size_t>(rows), limits_);
    std::fill(limits_ + rows, limits_ + kQueries, 0);  // lanes without a query see nothing
    for (int j = 0; j < 2; ++j) {
      most_[j] = _mm512_set1_ps(-kInfinity);
      base_[j] = total_[j] = _mm512_setzero_ps();
    }
    const int64_t keys = limits_[rows - 1];
    for (int64_t n0 = 0; n0 < keys; n0 += kKeys) {
      const int64_t n1 = std::min(n0 + kKeys, keys);
      scores(n0, n1);
      softmax(n0, n1, rows);
      weighted_sum(n0, n1);
    }
    if (keys == 0) std::memset(out_, 0, layout_.value_width * kQueries * sizeof(float));
    write(a.out.at(b, h) + q0 * a.out.strides.row, rows);
    if (a.logsumexp != nullptr)
      write_logsumexp(a.logsumexp + (b * problem_.H + h) * problem_.T + q0, rows);
  }

  bool pack_queries(const BFloat16* q, int64_t rows) {
    FiniteCheck finite;
    for (int64_t x = 0; x < layout_.key_width; x += kPairs) {
      for (int64_t j = 0; j < 2; ++j) {
        __m512i r[16];
        for (int64_t i = 0; i < 16; ++i) {
          const int64_t row = j * kLanes + i;
          r[i] = row < rows ? load(q + row * plan_.arguments->q.strides.row + x, problem_.D - x)
                            : _mm512_setzero_si512();
          finite.see(r[i]);
        }
        transpose(r);
        BFloat16* tile = query_ + (x / kPairs * 2 + j) * 512;
        for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(tile + i * kPairs, r[i]);
      }
    }
    return finite.ok();
  }

  // Sᵀ of keys n0 .. n1 - 1, rounded up to 32.
  void scores(int64_t n0, int64_t n1) {
    const int64_t stride = layout_.key_width * static_cast<int64_t>(sizeof(BFloat16));
    for (int64_t n = n0; n < n1; n += kPairs) {
      const BFloat16* k = keys_ + n * layout_.key_width;
      const BFloat16* q = query_;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t x = 0; x < layout_.key_width; x += kPairs, q += 2 * 512) {
        _tile_loadd(4, k + x, stride);
        _tile_loadd(6, q, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, q + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, k + kLanes * layout_.key_width + x, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      float* s = scores_ + (n - n0) * kQueries;
      constexpr int kStride = kQueries * sizeof(float);
      _tile_stored(0, s, kStride);
      _tile_stored(1, s + kLanes, kStride);
      _tile_stored(2, s + kLanes * kQueries, kStride);
      _tile_stored(3, s + kLanes * kQueries + kLanes, kStride);
    }
  }

  // Scores to weights 2^(score - greatest), two keys to a pair; the running total and Oᵀ so far
  // follow the greatest.
  void softmax(int64_t n0, int64_t n1, int64_t rows) {
    const __m512 scale = _mm512_set1_ps(scale_);
    const __m512 lowest = _mm512_set1_ps(-kInfinity);
    const __m512i interleave =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int j = 0; j < 2; ++j) {
      const __m512i limits = _mm512_loadu_si512(limits_ + j * kLanes);
      const bool partial = (j + 1) * kLanes > rows;
      const int64_t end = std::min<int64_t>(
          limits_[std::max<int64_t>(std::min((j + 1) * kLanes, rows) - 1, 0)], n1);
      const int64_t full =
          partial ? n0 : std::clamp<int64_t>(limits_[j * kLanes], n0, std::max(n0, end));
      const auto sees = [&](int64_t n) {
        return _mm512_cmpgt_epi32_mask(limits, _mm512_set1_epi32(static_cast<int>(n)));
      };
      const float* s = scores_ + j * kLanes;
      const auto score = [&](int64_t n) {
        return _mm512_mul_ps(_mm512_loadu_ps(s + (n - n0) * kQueries), scale);
      };
      __m512 most = most_[j];
      for (int64_t n = n0; n < full; ++n) most = _mm512_max_ps(most, score(n));
      for (int64_t n = full; n < end; ++n)
        most = _mm512_max_ps(most, _mm512_mask_blend_ps(sees(n), lowest, score(n)));
      // Where nothing was seen yet any finite number does: the weights are 0.
      const __mmask16 none = _mm512_cmp_ps_mask(most, lowest, _CMP_EQ_OQ);
      const __m512 base = _mm512_mask_blend_ps(none, most, _mm512_setzero_ps());
      if (n0 > 0 && _mm512_cmp_ps_mask(base, base_[j], _CMP_NEQ_OQ) != 0) {
        const __m512 factor = exp2(_mm512_sub_ps(base_[j], base));
        total_[j] = _mm512_mul_ps(total_[j], factor);
        for (int64_t x = 0; x < layout_.value_width; ++x) {
          float* o = out_ + x * kQueries + j * kLanes;
          _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), factor));
        }
      }
      most_[j] = most, base_[j] = base;

      const auto weight = [&](int64_t n) {
        return exp2(_mm512_fmsub_ps(_mm512_loadu_ps(s + (n - n0) * kQueries), scale, base));
      };
      const auto masked = [&](int64_t n) {
        return n < full ? weight(n) : _mm512_maskz_mov_ps(sees(n), weight(n));
      };
      __m512 total = total_[j], total_odd = _mm512_setzero_ps();
      const auto store = [&](int64_t n, __m512 even, __m512 odd) {
        total = _mm512_add_ps(total, even);
        total_odd = _mm512_add_ps(total_odd, odd);
        const auto both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm512_storeu_si512(weights_ + (n - n0) * kQueries + j * kPairs,
                            _mm512_permutexvar_epi16(interleave, both));
      };
      int64_t n = n0;
      for (; n + 2 <= full; n += 2) store(n, weight(n), weight(n + 1));
      for (; n < end; n += 2) store(n, masked(n), masked(n + 1));
      for (; n < n0 + round_up(n1 - n0, kPairs); n += 2)
        store(n, _mm512_setzero_ps(), _mm512_setzero_ps());
      total_[j] = _mm512_add_ps(total, total_odd);
    }
  }

  // Oᵀ += Vᵀ Pᵀ; the first block begins it.
  void weighted_sum(int64_t n0, int64_t n1) {
    int64_t x = 0;
    for (; x + 2 * kLanes <= layout_.value_width; x += 2 * kLanes) sum_tiles<true>(n0, n1, x);
    if (x < layout_.value_width) sum_tiles<false>(n0, n1, x);
  }

  template <bool kTwo>
  void sum_tiles(int64_t n0, int64_t n1, int64_t x) {
    constexpr int kStride = kQueries * sizeof(float);
    float* o = out_ + x * kQueries;
    if (n0 == 0) {
      _tile_zero(0);
      _tile_zero(1);
      if constexpr (kTwo) {
        _tile_zero(2);
        _tile_zero(3);
      }
    } else {
      _tile_loadd(0, o, kStride);
      _tile_loadd(1, o + kLanes, kStride);
      if constexpr (kTwo) {
        _tile_loadd(2, o + kLanes * kQueries, kStride);
        _tile_loadd(3, o + kLanes * kQueries + kLanes, kStride);
      }
    }
    for (int64_t n = n0; n < n1; n += kPairs) {
      const BFloat16* v = values_ + n * layout_.value_width + x * kPairs;
      const BFloat16* p = weights_ + (n - n0) * kQueries;
      _tile_loadd(4, v, 64);
      _tile_loadd(6, p, 2 * 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, p + kPairs, 2 * 64);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (kTwo) {
        _tile_loadd(5, v + kLanes * kPairs, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, o, kStride);
    _tile_stored(1, o + kLanes, kStride);
    if constexpr (kTwo) {
      _tile_stored(2, o + kLanes * kQueries, kStride);
      _tile_stored(3, o + kLanes * kQueries + kLanes, kStride);
    }
  }

  // Oᵀ / total, as rows of the output.
  void write(BFloat16* out, int64_t rows) {
    for (int j = 0; j < 2; ++j) {
      const __mmask16 some =
          _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(limits_ + j * kLanes), _mm512_setzero_si512());
      const __m512 inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(1.0F), total_[j]);
      const int64_t count = std::min<int64_t>(kLanes, rows - j * kLanes);
      for (int64_t x = 0; x < layout_.value_width && count > 0; x += kLanes) {
        __m512i r[16];
        for (int64_t i = 0; i < 16; ++i) {
          const __m512 o = _mm512_loadu_ps(out_ + (x + i) * kQueries + j * kLanes);
          r[i] = _mm512_castps_si512(_mm512_mul_ps(o, inverse));
        }
        transpose(r);
        const int64_t width = std::min<int64_t>(problem_.D - x, kLanes);
        const auto mask = static_cast<__mmask16>((1U << width) - 1U);
        for (int64_t i = 0; i < count; ++i) {
          BFloat16* to = out + (j * kLanes + i) * plan_.arguments->out.strides.row + x;
          _mm256_mask_storeu_epi16(to, mask,
                                   (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(r[i])));
        }
      }
    }
  }

  // log2 of each row's sum of 2^score.
  void write_logsumexp(float* to, int64_t rows) const {
    alignas(64) float base[kQueries], total[kQueries];
    for (int j = 0; j < 2; ++j) {
      _mm512_store_ps(base + j * kLanes, base_[j]);
      _mm512_store_ps(total + j * kLanes, total_[j]);
    }
    for (int64_t i = 0; i < rows; ++i)
      to[i] = limits_[i] > 0 ? base[i] + std::log2(total[i]) : -kInfinity;
  }

  const Plan& plan_;
  const Problem& problem_;
  const Layout& layout_;
  const float scale_;  // to base 2
  char* memory_;
  float* scores_;      // [kKeys][kQueries]
  BFloat16* weights_;  // [kKeys / 2][kQueries] pairs
  BFloat16* query_;    // [key_width / 32][2] tiles of 16 x 16 pairs
  float* out_;         // [value_width][kQueries]
  BFloat16* packed_;
  int32_t* indices_;
  const BFloat16 *keys_ = nullptr, *values_ = nullptr;
  int32_t limits_[kQueries];
  __m512 most_[2], base_[2],
      total_[2];  // a lane each query: greatest score, what is subtracted, sum
};

void run(void* data, int index) {
  Worker(*static_cast<const Plan*>(data)).run(index);
}
void pack_for_all(void* data, int index) {
  Worker(*static_cast<const Plan*>(data)).pack_for_all(index);
}

}  // namespace
}  // namespace attn::kernels
HWY_POP_ATTRIBUTES

namespace attn::kernels {

bool amx_usable() {
  static const bool usable = cpu_has_amx() && kernel_grants_amx();
  return usable;
}

bool amx_forward_pays(const Problem& p) {
  return p.dropout_p == 0.0F && p.T >= 32 && p.S >= 32 && p.D >= 8;
}

bool amx_forward(const ForwardArguments<BFloat16>& arguments, int workers, const Parallel& parallel,
                 const Allocator& allocator) {
  const Problem& p = arguments.problem;
  std::atomic<bool> finite{true};
  const int64_t blocks = (p.T + kUnitQueries - 1) / kUnitQueries;
  const bool share = workers > 1 && blocks > 1 && p.B * p.H < 2 * workers;
  Plan plan{&arguments, &allocator, nullptr, Layout(p), nullptr, blocks, &finite};
  const auto go = [&](int64_t units, int queues, void (*work)(void*, int)) {
    Dealer dealer(units, queues);
    plan.dealer = &dealer;
    if (workers == 1) {
      work(&plan, 0);
    } else {
      parallel.run(workers, work, &plan);
    }
  };
  if (share) {
    const int64_t heads = p.B * p.Hkv, parts = (plan.layout.keys + kUnitKeys - 1) / kUnitKeys;
    plan.shared = static_cast<BFloat16*>(
        allocator.allocate(static_cast<uint64_t>(heads * plan.layout.packed()) * sizeof(BFloat16)));
    go(heads * parts, workers, pack_for_all);
    go(p.B * p.H * blocks, /*queues=*/1, run);  // blocks differ in length: longest first
    allocator.release(plan.shared);
  } else {
    go(p.B * p.H, workers, run);
  }
  return finite.load(std::memory_order_relaxed);
}

}  // namespace attn::kernels

#else

namespace attn::kernels {

bool amx_usable() {
  return false;
}
bool amx_forward_pays(const Problem&) {
  return false;
}
bool amx_forward(const ForwardArguments<BFloat16>&, int, const Parallel&, const Allocator&) {
  return false;
}

}  // namespace attn::kernels

#endif
