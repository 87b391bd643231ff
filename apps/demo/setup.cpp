#include "setup.h"

#include <attn/version.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <fmt/format.h>

#include <stdexcept>

namespace demo {

std::string attn_version() {
  return attn::version();
}

std::string torch_version() {
  return TORCH_VERSION;
}

std::string versions() {
  return fmt::format("attn {}, LibTorch {}", attn_version(), torch_version());
}

Setup make_setup(const Options& options) {
  const c10::Device device(options.device);
  if (device.is_cuda()) {
    if (!at::hasCUDA()) {
      throw std::runtime_error(
          fmt::format("--device {}: the CUDA part of LibTorch is not linked, or no GPU is there",
                      options.device));
    }
    const auto count = at::getNumGPUs();
    if (count <= static_cast<size_t>(device.has_index() ? device.index() : 0)) {
      throw std::runtime_error(
          fmt::format("--device {}: no such GPU, {} found", options.device, count));
    }
  }
  at::set_num_threads(static_cast<int>(options.threads));
  return {device, at::get_num_threads(), at::get_cpu_capability()};
}

}  // namespace demo
