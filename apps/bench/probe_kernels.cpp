#include "probe_kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "probe_kernels.cpp"
#include <hwy/foreach_target.h>  // compiles this file once for each instruction set
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace bench::probe::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

// 12 independent sums: two units with a latency of four need eight, and more than 13 registers
// would spill with AVX2.
constexpr int kSums = 12;

HWY_ATTR float MultiplyAdd(int64_t steps, float start) {
  const D d;
  const V a = hn::Set(d, 0.75F);  // the sums stay at 4 * start
  const V b = hn::Set(d, start);
  // Different starts: the compiler would make one sum of equal ones.
  V s0 = hn::Iota(d, start), s1 = hn::Add(s0, a), s2 = hn::Add(s1, a), s3 = hn::Add(s2, a);
  V s4 = hn::Add(s3, a), s5 = hn::Add(s4, a), s6 = hn::Add(s5, a), s7 = hn::Add(s6, a);
  V s8 = hn::Add(s7, a), s9 = hn::Add(s8, a), s10 = hn::Add(s9, a), s11 = hn::Add(s10, a);
  for (int64_t i = 0; i < steps; ++i) {
    s0 = hn::MulAdd(s0, a, b);
    s1 = hn::MulAdd(s1, a, b);
    s2 = hn::MulAdd(s2, a, b);
    s3 = hn::MulAdd(s3, a, b);
    s4 = hn::MulAdd(s4, a, b);
    s5 = hn::MulAdd(s5, a, b);
    s6 = hn::MulAdd(s6, a, b);
    s7 = hn::MulAdd(s7, a, b);
    s8 = hn::MulAdd(s8, a, b);
    s9 = hn::MulAdd(s9, a, b);
    s10 = hn::MulAdd(s10, a, b);
    s11 = hn::MulAdd(s11, a, b);
  }
  const V low = hn::Add(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)), hn::Add(s4, s5));
  const V high = hn::Add(hn::Add(hn::Add(s6, s7), hn::Add(s8, s9)), hn::Add(s10, s11));
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(low, high)));
}

// The least that gives float32's precision: rounding, a polynomial of degree 6, the exponent by
// integer addition.
HWY_INLINE V Exp2(V x) {
  const D d;
  const hn::RebindToSigned<D> di;
  const V magic = hn::Set(d, 12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
  const V shifted = hn::Add(hn::Max(x, hn::Set(d, -127.0F)), magic);
  const V r = hn::Sub(x, hn::Sub(shifted, magic));
  V p = hn::Set(d, 1.5353362e-4F);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3398874e-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 9.6184374e-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 5.5503325e-2F));
  p = hn::MulAdd(p, r, hn::Set(d, 2.4022648e-1F));
  p = hn::MulAdd(p, r, hn::Set(d, 6.9314720e-1F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
}

HWY_ATTR void Exponentials(const float* HWY_RESTRICT x, float* HWY_RESTRICT to, int64_t count) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i + lanes <= count; i += lanes) {
    hn::StoreU(Exp2(hn::LoadU(d, x + i)), d, to + i);
  }
}

HWY_ATTR float Read(const float* HWY_RESTRICT data, int64_t count) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  V s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (int64_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    s0 = hn::Add(s0, hn::LoadU(d, data + i));
    s1 = hn::Add(s1, hn::LoadU(d, data + i + lanes));
    s2 = hn::Add(s2, hn::LoadU(d, data + i + 2 * lanes));
    s3 = hn::Add(s3, hn::LoadU(d, data + i + 3 * lanes));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

Kernels Make() {
  return {hwy::TargetName(HWY_TARGET), 2 * kSums * static_cast<int64_t>(hn::Lanes(D())),
          MultiplyAdd, Exponentials, Read};
}

}  // namespace
Kernels Get() {
  return Make();
}
}  // namespace bench::probe::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace bench::probe {

HWY_EXPORT(Get);

namespace {
int64_t allowed_targets([[maybe_unused]] const std::string& capability) {
#if HWY_ARCH_X86
  // The better a target, the lower its bit.
  if (capability == "AVX2") return ~int64_t{HWY_AVX2 - 1};
  if (capability == "DEFAULT") return ~int64_t{HWY_SSE4 - 1};
#endif
  return ~int64_t{0};
}
}  // namespace

Kernels kernels(const std::string& capability) {
#if (HWY_TARGETS & (HWY_TARGETS - 1)) == 0  // compiled for one instruction set only
  (void)allowed_targets;
  (void)capability;
  return HWY_STATIC_DISPATCH(Get)();
#else
  // A choice of its own: the process-wide one of Highway belongs to the library that is measured.
  hwy::ChosenTarget chosen;
  chosen.Update(hwy::SupportedTargets() & allowed_targets(capability));
  return HWY_DISPATCH_TABLE(Get)[chosen.GetIndex()]();
#endif
}

}  // namespace bench::probe
#endif
