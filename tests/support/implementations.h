#pragma once

#include <attn/functional.h>

#include <torch/types.h>

#include <gtest/gtest.h>

namespace attn::testing {

inline constexpr Implementation kImplementations[] = {
    Implementation::automatic,
    Implementation::math,
    Implementation::fused,
};

inline const char* name_of(Implementation implementation) {
  switch (implementation) {
    case Implementation::automatic:
      return "automatic";
    case Implementation::math:
      return "math";
    case Implementation::fused:
      return "fused";
  }
  return "unknown";
}

/// Whether the implementation takes CPU tensors of that dtype.
inline bool takes(Implementation implementation, torch::Dtype dtype) {
  return implementation != Implementation::fused ||
         functional::fused_obstacle(torch::empty({1}, dtype)).empty();
}

/// The most exact dtype that the implementation takes.
inline torch::Dtype exact_dtype(Implementation implementation) {
  return takes(implementation, torch::kFloat64) ? torch::kFloat64 : torch::kFloat32;
}

/// Base of tests that run with each implementation; instantiate with
/// ATTN_EACH_IMPLEMENTATION(Name).
class EachImplementation : public ::testing::TestWithParam<Implementation> {};

inline std::string implementation_name(const ::testing::TestParamInfo<Implementation>& info) {
  return name_of(info.param);
}

}  // namespace attn::testing

#define ATTN_EACH_IMPLEMENTATION(suite)                                                         \
  INSTANTIATE_TEST_SUITE_P(Each, suite, ::testing::ValuesIn(::attn::testing::kImplementations), \
                           ::attn::testing::implementation_name)
