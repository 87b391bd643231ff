#include "setup.h"

#include "support/device.h"

#include <attn/version.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <fmt/format.h>

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
  const auto device = apps::find_device(options.device);
  at::set_num_threads(static_cast<int>(options.threads));
  return {device, at::get_num_threads(), at::get_cpu_capability()};
}

}  // namespace demo
