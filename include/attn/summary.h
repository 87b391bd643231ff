#pragma once

#include <attn/export.h>

#include <torch/nn/module.h>

#include <cstdint>
#include <string>

namespace attn {

/// Number of elements of all parameters; a tensor that several names share counts once.
ATTN_API int64_t count_parameters(const torch::nn::Module& module);

/// The module as a tree: names, types, shapes, parameter counts and bytes, and the totals.
ATTN_API std::string summary(const torch::nn::Module& module);

}  // namespace attn
