#pragma once

#include <attn/state_dict.h>

#include <c10/core/Device.h>

namespace attn::weights {

/// The tensors on `device`, detached; what shares a storage shares one there too, strides are kept.
StateDict moved_to(const StateDict& state, c10::Device device);

}  // namespace attn::weights
