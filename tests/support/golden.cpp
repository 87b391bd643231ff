#include "support/golden.h"

#include <torch/types.h>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

namespace attn::testing {
namespace {

torch::Dtype dtype_of(const std::string& name) {
  if (name == "F32") return torch::kFloat32;
  if (name == "F64") return torch::kFloat64;
  if (name == "I64") return torch::kInt64;
  if (name == "BOOL") return torch::kBool;
  throw std::runtime_error("dtype must be F32, F64, I64 or BOOL, got " + name);
}

std::string read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot open " + path);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace

// A safetensors file: 8 bytes length of the header (little-endian), the header in JSON, the
// tensors' bytes.
Golden load_golden(const std::string& name) {
  Golden golden;
  golden.file = std::string(ATTN_GOLDEN_DIR) + "/" + name + ".safetensors";
  const std::string bytes = read_file(golden.file);
  uint64_t header_size = 0;
  if (bytes.size() < sizeof header_size) throw std::runtime_error(golden.file + " is truncated");
  std::memcpy(&header_size, bytes.data(), sizeof header_size);
  if (header_size > bytes.size() - sizeof header_size) {
    throw std::runtime_error(golden.file + " is truncated");
  }
  const char* data = bytes.data() + sizeof header_size + header_size;
  const size_t data_size = bytes.size() - sizeof header_size - header_size;

  const auto header = nlohmann::json::parse(bytes.data() + sizeof header_size, data);
  for (const auto& [key, entry] : header.items()) {
    if (key == "__metadata__") {
      golden.metadata = entry.get<std::map<std::string, std::string>>();
      continue;
    }
    const auto tensor = torch::empty(entry.at("shape").get<std::vector<int64_t>>(),
                                     dtype_of(entry.at("dtype").get<std::string>()));
    const auto begin = entry.at("data_offsets").at(0).get<size_t>();
    const auto end = entry.at("data_offsets").at(1).get<size_t>();
    if (begin > end || end > data_size || end - begin != tensor.nbytes()) {
      throw std::runtime_error(golden.file + ": the offsets of " + key + " do not fit");
    }
    std::memcpy(tensor.mutable_data_ptr(), data + begin, tensor.nbytes());
    golden.tensors.emplace(key, tensor);
  }
  return golden;
}

const torch::Tensor& Golden::operator[](const std::string& key) const {
  const auto found = tensors.find(key);
  if (found == tensors.end()) throw std::out_of_range(file + " has no tensor " + key);
  return found->second;
}

std::map<std::string, torch::Tensor> Golden::with_prefix(const std::string& prefix) const {
  std::map<std::string, torch::Tensor> found;
  for (const auto& [key, tensor] : tensors) {
    if (key.starts_with(prefix)) found.emplace(key.substr(prefix.size()), tensor);
  }
  if (found.empty()) throw std::out_of_range(file + " has no tensor " + prefix + "*");
  return found;
}

}  // namespace attn::testing
