#pragma once

#include "options.h"

#include <c10/core/Device.h>

#include <string>

namespace demo {

/// Where and how LibTorch computes in this run.
struct Setup {
  c10::Device device;
  int threads;
  std::string instruction_set;  ///< of LibTorch's CPU kernels
};

/// "attn 0.1.0, LibTorch 2.15.0"
std::string versions();
std::string attn_version();
std::string torch_version();

/// Finds the device and sets the number of threads.
/// @throws std::runtime_error if the device is not there.
Setup make_setup(const Options& options);

}  // namespace demo
