#pragma once

// Which instruction set the kernels run with.

#include <string>
#include <vector>

namespace attn::kernels {

/// The one that the next call uses: "AMX" (with AVX-512 beside it), "AVX3" (AVX-512), "AVX2",
/// "SSE4" and so on, Highway's names.
const char* instruction_set();

/// Whether that is AMX.
bool amx_chosen();

/// All that this machine has and the kernels were compiled for, best first.
std::vector<std::string> instruction_sets();

/// Use no better one than `name` from now on, in the whole process; unknown names are ignored. Not
/// while a kernel runs.
void limit_instruction_set(const std::string& name);

}  // namespace attn::kernels
