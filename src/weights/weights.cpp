#include "attn/weights.h"

#include "json.h"
#include "weights/in_quotes.h"
#include "weights/mapped_file.h"
#include "weights/moved_to.h"
#include "weights/output_file.h"
#include "weights/pytorch_file.h"
#include "weights/safetensors.h"
#include "weights/zip_directory.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

namespace attn {
namespace {

namespace fs = std::filesystem;
using weights::in_quotes;
using weights::MappedFile;

constexpr const char* kSafetensorsExtension = ".safetensors";
constexpr std::array kPytorchExtensions = {".pt", ".pth", ".bin"};

bool looks_like_pickle(const MappedFile& file) {
  return file.bytes().starts_with("\x80\x02");
}

// A JSON object, whose first bytes as a safetensors header's length are beyond any file.
bool looks_like_index(const MappedFile& file) {
  return file.bytes().starts_with('{');
}

StateDict load_tensors(const std::shared_ptr<const MappedFile>& file, const std::string& key) {
  const auto& name = file->name();
  if (weights::looks_like_zip(*file)) return weights::read_pytorch(file, key);
  TORCH_CHECK_VALUE(!looks_like_pickle(*file), name,
                    " must be in PyTorch's zip format, got its format before 1.6 or a bare pickle; "
                    "load it in Python and torch.save it again");
  TORCH_CHECK_VALUE(!file->bytes().starts_with("version https://git-lfs"), name,
                    " must hold weights, got a Git LFS pointer; fetch the file with git lfs pull");
  TORCH_CHECK_VALUE(weights::looks_like_safetensors(*file), name,
                    " must be a safetensors file, PyTorch's zip format or an index of shards, got "
                    "something else, or a truncated file");
  TORCH_CHECK_VALUE(key.empty(), name, ": key must be empty for a safetensors file, got ",
                    in_quotes(key));
  return weights::read_safetensors(file).tensors;
}

// The shards' names by the tensors', of a Hugging Face index.
std::map<std::string, std::string> weight_map(const MappedFile& file) {
  const auto index = parse_json(file.bytes(), file.name());
  const auto found = index.find("weight_map");
  TORCH_CHECK_VALUE(found != index.end() && found->is_object(), file.name(),
                    ": an index of shards must have an object weight_map, got none");
  std::map<std::string, std::string> shards;
  for (const auto& [tensor, shard] : found->items()) {
    TORCH_CHECK_VALUE(shard.is_string(), file.name(), ": weight_map must hold strings, got ",
                      shard.type_name(), " for ", in_quotes(tensor));
    const auto& name = shard.get_ref<const std::string&>();
    // A path would let an index read any file.
    TORCH_CHECK_VALUE(!name.empty() && name != "." && name != ".." &&
                          name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos,
                      file.name(), ": a shard must be the name of a file beside the index, got ",
                      in_quotes(name));
    shards.emplace(tensor, name);
  }
  return shards;
}

StateDict load_index(const MappedFile& file, const fs::path& path, const std::string& key) {
  std::map<std::string, StateDict> shards;
  StateDict state("state_dict");
  for (const auto& [tensor, shard] : weight_map(file)) {
    auto loaded = shards.find(shard);
    if (loaded == shards.end()) {
      const auto shard_file = std::make_shared<const MappedFile>(path.parent_path() / shard);
      loaded = shards.emplace(shard, load_tensors(shard_file, key)).first;
    }
    const auto* found = loaded->second.find(tensor);
    TORCH_CHECK_VALUE(found != nullptr, file.name(), ": shard ", in_quotes(shard), " must hold ",
                      in_quotes(tensor), ", got a shard without it");
    state.insert(tensor, Tensor(*found));
  }
  return state;
}

// The file of a model folder that holds the weights, as transformers looks for it.
fs::path file_in(const fs::path& folder) {
  for (const auto* name : {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                           "pytorch_model.bin.index.json"}) {
    std::error_code ignored;
    if (fs::exists(folder / name, ignored)) return folder / name;
  }
  TORCH_CHECK_VALUE(false, in_quotes(folder.string()),
                    " must hold model.safetensors or pytorch_model.bin (or one's .index.json), got "
                    "a folder without");
}

StateDict load_path(const fs::path& path, const std::string& key) {
  std::error_code ignored;
  const auto chosen = fs::is_directory(path, ignored) ? file_in(path) : path;
  const auto file = std::make_shared<const MappedFile>(chosen);
  if (looks_like_index(*file) && !weights::looks_like_safetensors(*file)) {
    return load_index(*file, chosen, key);
  }
  return load_tensors(file, key);
}

void check_savable(const StateDict& state, const std::string& file) {
  for (const auto& item : state) {
    const auto& tensor = item.value();
    TORCH_CHECK_VALUE(tensor.defined(), file, ": tensor ", in_quotes(item.key()),
                      " must be defined, got an undefined one");
    TORCH_CHECK_VALUE(
        tensor.layout() == at::kStrided && !tensor.is_meta() && !tensor.is_quantized(), file,
        ": tensor ", in_quotes(item.key()), " must be a dense tensor with values, got ",
        tensor.toString());
  }
}

}  // namespace

StateDict load_weights(const fs::path& path, const LoadWeightsOptions& options) {
  auto state = load_path(path, options.key);
  return options.device.is_cpu() ? state : weights::moved_to(state, options.device);
}

std::map<std::string, std::string> load_metadata(const fs::path& path) {
  return weights::read_safetensors(std::make_shared<const MappedFile>(path)).metadata;
}

void save_weights(const StateDict& state, const fs::path& path, const SaveWeightsOptions& options) {
  const auto name = in_quotes(path.string());
  const auto extension = path.extension();
  const bool pytorch = std::find(kPytorchExtensions.begin(), kPytorchExtensions.end(), extension) !=
                       kPytorchExtensions.end();
  TORCH_CHECK_VALUE(pytorch || extension == kSafetensorsExtension, name,
                    " must end in .safetensors, .pt, .pth or .bin, got ",
                    in_quotes(extension.string()));
  TORCH_CHECK_VALUE(!pytorch || options.metadata.empty(), name,
                    ": metadata must be empty, for PyTorch's format has no place for them, got ",
                    options.metadata.size());
  check_savable(state, name);
  weights::OutputFile file(path);
  if (pytorch) {
    weights::write_pytorch(state, file);
  } else {
    weights::write_safetensors(state, options.metadata, file);
  }
  file.commit();
}

}  // namespace attn
