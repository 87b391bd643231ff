#include "attn/weights.h"

#include "weights/in_quotes.h"
#include "weights/mapped_file.h"
#include "weights/output_file.h"
#include "weights/safetensors.h"

#include <c10/util/Exception.h>

#include <memory>
#include <utility>

namespace attn {
namespace {

namespace fs = std::filesystem;
using weights::in_quotes;
using weights::MappedFile;

StateDict load_file(const fs::path& path, const LoadWeightsOptions& options) {
  const auto file = std::make_shared<const MappedFile>(path);
  TORCH_CHECK_VALUE(weights::looks_like_safetensors(*file), file->name(),
                    " must be a safetensors file, got something else");
  TORCH_CHECK_VALUE(options.key.empty(), file->name(),
                    ": key must be empty for a safetensors file, got ", in_quotes(options.key));
  return weights::read_safetensors(file).tensors;
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
  auto state = load_file(path, options);
  if (options.device.is_cpu()) return state;
  StateDict moved;
  for (const auto& item : state) moved.insert(item.key(), item.value().to(options.device));
  return moved;
}

std::map<std::string, std::string> load_metadata(const fs::path& path) {
  return weights::read_safetensors(std::make_shared<const MappedFile>(path)).metadata;
}

void save_weights(const StateDict& state, const fs::path& path, const SaveWeightsOptions& options) {
  const auto name = in_quotes(path.string());
  TORCH_CHECK_VALUE(path.extension() == ".safetensors", name,
                    " must end in .safetensors, got another extension");
  check_savable(state, name);
  weights::OutputFile file(path);
  weights::write_safetensors(state, options.metadata, file);
  file.commit();
}

}  // namespace attn
