#pragma once

// safetensors: 8 bytes length of the header (little-endian), the header in JSON, the tensors' bytes
// without gaps. https://github.com/huggingface/safetensors

#include "weights/mapped_file.h"
#include "weights/output_file.h"

#include <attn/state_dict.h>

#include <map>
#include <memory>
#include <string>

namespace attn::weights {

struct Safetensors {
  StateDict tensors;  ///< in the order of their bytes
  std::map<std::string, std::string> metadata;
};

/// The file begins as a safetensors file does: a length that fits, then a JSON object.
bool looks_like_safetensors(const MappedFile& file);

/// @throws c10::ValueError if anything in the file is not as it must be.
Safetensors read_safetensors(const std::shared_ptr<const MappedFile>& file);

/// Byte for byte what the Python library writes. @throws c10::ValueError for a tensor that has no
/// place in the format.
void write_safetensors(const StateDict& state, const std::map<std::string, std::string>& metadata,
                       OutputFile& file);

}  // namespace attn::weights
