// Attention forward: threads, and the choice of the instruction set. The algorithm is in
// forward-inl.h.

#include "kernels/attention.h"
#include "kernels/schedule.h"

// Highway includes this file again from here, once per instruction set.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention_forward.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "kernels/forward-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace attn::kernels::HWY_NAMESPACE {
namespace {

template <typename T>
HWY_ATTR void Work(void* data, int index) {
  ForwardWorker<T>(*static_cast<const ForwardPlan<T>*>(data)).Run(index);
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
#include "kernels/amx_forward.h"
#include "kernels/instruction_set.h"

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
  if constexpr (sizeof(T) != sizeof(float)) {
    if (amx_forward_pays(p) && amx_chosen() && amx_forward(arguments, workers, parallel, allocator))
      return;
  }
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
