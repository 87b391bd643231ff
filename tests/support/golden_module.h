#pragma once

// Goldens against modules: parameters and gradients by name.

#include "support/all_close.h"

#include <ATen/Version.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace attn::testing {

using NamedTensors = std::map<std::string, torch::Tensor>;

/// Without AVX2 (or with ATEN_CPU_CAPABILITY=default) LibTorch's randn rounds otherwise than where
/// the goldens were drawn, so nothing drawn can be bit-equal.
inline bool draws_as_the_goldens() {
  return at::get_cpu_capability() != "DEFAULT";
}
inline constexpr const char* kOtherDraws = "randn draws other numbers without AVX2";

/// The names are the module's, and the values are bit-equal.
inline void expect_parameters_equal(const torch::nn::Module& module, const NamedTensors& expected) {
  const auto parameters = module.named_parameters();
  EXPECT_EQ(parameters.size(), expected.size());
  for (const auto& [name, value] : expected) {
    const auto* parameter = parameters.find(name);
    ASSERT_NE(parameter, nullptr) << name;
    EXPECT_TRUE(all_equal(*parameter, value)) << name;
  }
}

/// Every parameter gets the value of its name.
inline void set_parameters(torch::nn::Module& module, const NamedTensors& values) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.named_parameters()) {
    parameter.value().copy_(values.at(parameter.key()));
  }
  expect_parameters_equal(module, values);
}

/// Every parameter's gradient is the expected one of its name, within float32 rounding.
inline void expect_gradients_close(const torch::nn::Module& module, const NamedTensors& expected) {
  for (const auto& parameter : module.named_parameters()) {
    const auto found = expected.find(parameter.key());
    ASSERT_NE(found, expected.end()) << parameter.key();
    EXPECT_TRUE(all_close(parameter.value().grad(), found->second)) << parameter.key();
  }
}

using Keys = std::vector<std::string>;

}  // namespace attn::testing
