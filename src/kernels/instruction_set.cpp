#include "kernels/instruction_set.h"

#include "kernels/amx_forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/instruction_set.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace attn::kernels::HWY_NAMESPACE {

int64_t CurrentTarget() {
  return HWY_TARGET;
}

}  // namespace attn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <atomic>

namespace attn::kernels {

HWY_EXPORT(CurrentTarget);

namespace {

// All usable ones, whatever the limit now is. Highway gives better instruction sets lower bits.
const std::vector<int64_t>& targets() {
  static const std::vector<int64_t> all = [] {
    std::vector<int64_t> found;
    const int64_t usable = hwy::SupportedTargets() & (HWY_TARGETS);
    for (int64_t bit = 1; bit > 0 && bit <= usable; bit <<= 1) {
      if ((usable & bit) != 0) found.push_back(bit);
    }
    return found;
  }();
  return all;
}

// Beside the vectors of the best target; bfloat16 alone uses it.
constexpr const char* kAmx = "AMX";
std::atomic<bool> amx_allowed{true};

}  // namespace

bool amx_chosen() {
  return amx_allowed.load(std::memory_order_relaxed) && amx_usable();
}

const char* instruction_set() {
  if (amx_chosen()) return kAmx;
  return hwy::TargetName(HWY_DYNAMIC_DISPATCH(CurrentTarget)());
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  if (amx_usable()) names.emplace_back(kAmx);
  for (const int64_t target : targets()) names.emplace_back(hwy::TargetName(target));
  return names;
}

void limit_instruction_set(const std::string& name) {
  if (name == kAmx && amx_usable()) {
    amx_allowed = true;
    hwy::DisableTargets(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    return;
  }
  int64_t better = 0;
  for (const int64_t target : targets()) {
    if (name == hwy::TargetName(target)) {
      amx_allowed = false;
      hwy::DisableTargets(better);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      return;
    }
    better |= target;
  }
}

}  // namespace attn::kernels
#endif
