// A linear layer for few rows. Every weight is used `rows` times only, so memory sets the pace:
// four rows of the weight are read side by side, each far enough ahead to hide its latency.

#include "kernels/row_linear.h"

// Highway includes this file again from here, once per instruction set.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/row_linear.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "kernels/tile-inl.h"
// clang-format on

#include <hwy/cache_control.h>

HWY_BEFORE_NAMESPACE();
namespace attn::kernels::HWY_NAMESPACE {
namespace {

constexpr size_t kOutputs = 4;        // rows of the weight at once
constexpr size_t kAheadBytes = 1024;  // in each of them

HWY_INLINE VF LoadWide(const float* from) {
  return hn::LoadU(DF(), from);
}
HWY_INLINE VF LoadWide(const BFloat16* from) {
  const hn::Rebind<uint16_t, DF> half;
  const hn::RebindToUnsigned<DF> wide;
  const auto bits = hn::PromoteTo(wide, hn::LoadU(half, &from->bits));
  return hn::BitCast(DF(), hn::ShiftLeft<16>(bits));
}
HWY_INLINE float Wide(float value) {
  return value;
}
HWY_INLINE float Wide(BFloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// kN outputs from `n` on, of kRows rows.
template <size_t kRows, size_t kN, typename T>
HWY_INLINE void Outputs(const RowLinearArguments<T>& a, size_t n) {
  const DF d;
  const auto K = static_cast<size_t>(a.K), N = static_cast<size_t>(a.N);
  const T* w = a.weight + n * K;
  VF sums[kRows][kN];
  for (size_t r = 0; r < kRows; ++r)
    for (size_t i = 0; i < kN; ++i) sums[r][i] = hn::Zero(d);
  size_t k = 0;
  for (; k + kLanes <= K; k += kLanes) {
    VF weights[kN];
    for (size_t i = 0; i < kN; ++i) {
      const T* from = w + i * K + k;
      hwy::Prefetch(reinterpret_cast<const char*>(from) + kAheadBytes);
      weights[i] = LoadWide(from);
    }
    for (size_t r = 0; r < kRows; ++r) {
      const VF x = hn::LoadU(d, a.x + r * K + k);
      for (size_t i = 0; i < kN; ++i) sums[r][i] = hn::MulAdd(x, weights[i], sums[r][i]);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t i = 0; i < kN; ++i) {
      float sum = hn::GetLane(hn::SumOfLanes(d, sums[r][i]));
      for (size_t rest = k; rest < K; ++rest) sum += a.x[r * K + rest] * Wide(w[i * K + rest]);
      a.y[r * N + n + i] = sum + (a.bias == nullptr ? 0.0F : a.bias[n + i]);
    }
  }
}

template <size_t kRows, typename T>
HWY_NOINLINE HWY_ATTR void Rows(const RowLinearArguments<T>& a, size_t first, size_t last) {
  size_t n = first;
  for (; n + kOutputs <= last; n += kOutputs) Outputs<kRows, kOutputs>(a, n);
  for (; n < last; ++n) Outputs<kRows, 1>(a, n);
}

template <typename T>
HWY_ATTR void Split(const RowLinearArguments<T>& a, int64_t first, int64_t last) {
  const auto begin = static_cast<size_t>(first), end = static_cast<size_t>(last);
  switch (a.rows) {
    case 1:
      return Rows<1>(a, begin, end);
    case 2:
      return Rows<2>(a, begin, end);
    case 3:
      return Rows<3>(a, begin, end);
    default:
      return Rows<4>(a, begin, end);
  }
}

HWY_ATTR void RowLinearFloat(const RowLinearArguments<float>& a, int64_t first, int64_t last) {
  Split(a, first, last);
}
HWY_ATTR void RowLinearBFloat16(const RowLinearArguments<BFloat16>& a, int64_t first,
                                int64_t last) {
  Split(a, first, last);
}

}  // namespace
}  // namespace attn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attn::kernels {

HWY_EXPORT(RowLinearFloat);
HWY_EXPORT(RowLinearBFloat16);

template <>
void row_linear(const RowLinearArguments<float>& arguments, int64_t first, int64_t last) {
  HWY_DYNAMIC_DISPATCH(RowLinearFloat)(arguments, first, last);
}
template <>
void row_linear(const RowLinearArguments<BFloat16>& arguments, int64_t first, int64_t last) {
  HWY_DYNAMIC_DISPATCH(RowLinearBFloat16)(arguments, first, last);
}

}  // namespace attn::kernels
#endif
