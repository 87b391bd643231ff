#include "kernels/instruction_set.h"

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

}  // namespace

const char* instruction_set() {
  return hwy::TargetName(HWY_DYNAMIC_DISPATCH(CurrentTarget)());
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const int64_t target : targets()) names.emplace_back(hwy::TargetName(target));
  return names;
}

void limit_instruction_set(const std::string& name) {
  int64_t better = 0;
  for (const int64_t target : targets()) {
    if (name == hwy::TargetName(target)) {
      hwy::DisableTargets(better);
      hwy::GetChosenTarget().Update(hwy::SupportedTargets());
      return;
    }
    better |= target;
  }
}

}  // namespace attn::kernels
#endif
