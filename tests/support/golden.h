#pragma once

// Reads the reference results in tests/golden/*.safetensors (files of our own, trusted).

#include <torch/types.h>

#include <map>
#include <string>

namespace attn::testing {

struct Golden {
  std::map<std::string, torch::Tensor> tensors;
  std::map<std::string, std::string> metadata;  ///< values are JSON

  /// The tensor of that name; throws std::out_of_range naming the file and the key otherwise.
  const torch::Tensor& operator[](const std::string& key) const;
  /// Those whose name starts with `prefix`, with it removed: with_prefix("weight.").
  std::map<std::string, torch::Tensor> with_prefix(const std::string& prefix) const;

  std::string file;
};

/// tests/golden/<name>.safetensors.
Golden load_golden(const std::string& name);

}  // namespace attn::testing
