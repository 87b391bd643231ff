#pragma once

// The forward of bfloat16 attention on Intel's matrix unit (AMX, Sapphire Rapids and later), 16 to
// 32 times the multiply-adds of a vector instruction. Elsewhere nothing here is called.

#include "kernels/attention.h"

namespace attn::kernels {

/// Whether this machine, and its kernel, let the process use AMX with bfloat16. Asks once.
bool amx_usable();

/// Whether `amx_forward` takes such a problem, and is measured faster than vector instructions.
bool amx_forward_pays(const Problem& problem);

/// As `attention_forward`, to bfloat16's rounding. Returns false, with `out` in any state, where an
/// input is infinite or NaN: this code multiplies what is masked by 0 and would spread it.
bool amx_forward(const ForwardArguments<BFloat16>& arguments, int workers, const Parallel& parallel,
                 const Allocator& allocator);

}  // namespace attn::kernels
