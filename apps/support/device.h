#pragma once

#include <c10/core/Device.h>

#include <string>

namespace apps {

/// The device that --device names (see `device_name`).
/// @throws std::runtime_error if it is not there.
c10::Device find_device(const std::string& name);

}  // namespace apps
