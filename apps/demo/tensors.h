#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace demo {

/// The elements in order, whatever the device.
inline std::vector<double> values_of(const at::Tensor& tensor) {
  const auto copy = tensor.detach().to(at::kCPU, at::kDouble).contiguous();
  return {copy.const_data_ptr<double>(), copy.const_data_ptr<double>() + copy.numel()};
}

inline double greatest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

}  // namespace demo
