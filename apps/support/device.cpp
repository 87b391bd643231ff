#include "support/device.h"

#include <ATen/Context.h>

#include <fmt/format.h>

#include <stdexcept>

namespace apps {

c10::Device find_device(const std::string& name) {
  const c10::Device device(name);
  if (device.is_cuda()) {
    if (!at::hasCUDA()) {
      throw std::runtime_error(fmt::format(
          "--device {}: the CUDA part of LibTorch is not linked, or no GPU is there", name));
    }
    const auto count = at::getNumGPUs();
    if (count <= static_cast<size_t>(device.has_index() ? device.index() : 0)) {
      throw std::runtime_error(fmt::format("--device {}: no such GPU, {} found", name, count));
    }
  }
  return device;
}

}  // namespace apps
