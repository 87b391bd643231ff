#pragma once

// PyTorch's own format: a zip container with a pickle and one record for each storage.

#include "weights/mapped_file.h"
#include "weights/output_file.h"

#include <attn/state_dict.h>

#include <memory>
#include <string>

namespace attn::weights {

/// The state_dict in such a file, under `key` or the only one. Tensors alias the file.
/// @throws c10::ValueError
StateDict read_pytorch(const std::shared_ptr<const MappedFile>& file, const std::string& key);

/// Writes a dict of the tensors that `torch.load(weights_only=True)` reads.
void write_pytorch(const StateDict& state, OutputFile& file);

}  // namespace attn::weights
