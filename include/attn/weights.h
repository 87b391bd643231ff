#pragma once

/// Weights in safetensors files, both ways.
///
/// @code
/// attn::SelfAttention trained(/*n_embd=*/8, /*n_head=*/2), fresh(8, 2);
/// const auto file = std::filesystem::temp_directory_path() / "attn_example.safetensors";
/// attn::save_weights(attn::state_dict(*trained), file);
/// attn::load_state_dict(*fresh, attn::load_weights(file));
/// bool same = torch::equal(fresh->qkv->weight, trained->qkv->weight);  // true
/// std::filesystem::remove(file);
/// @endcode

#include <attn/export.h>
#include <attn/state_dict.h>

#include <c10/core/Device.h>

#include <filesystem>
#include <map>
#include <string>

namespace attn {

struct LoadWeightsOptions {
  torch::Device device = torch::kCPU;  ///< where the tensors end up, wherever they were saved
  /// Of the state_dict in a checkpoint; safetensors files have none.
  std::string key;
};

struct SaveWeightsOptions {
  /// safetensors' `__metadata__`. "format" is "pt" unless given here: transformers asks for it.
  std::map<std::string, std::string> metadata;
};

/// The tensors of a safetensors file, recognised by its content, in the order of the data in it. A
/// name that a tied model left out (see `save_weights`) is there again, sharing the kept tensor.
///
/// On the CPU the tensors alias a private memory map: opening is fast whatever the size, pages are
/// read when touched, and writing to a tensor does not change the file. While they live the file
/// may be replaced (as `save_weights` does) but must not be truncated or written in place.
///
/// @throws c10::ValueError, which names the file, when it can't be read, is damaged, hostile or of
/// another kind.
ATTN_API StateDict load_weights(const std::filesystem::path& path,
                                const LoadWeightsOptions& options = {});

/// The `__metadata__` of a safetensors file; empty if it has none.
/// @throws c10::ValueError if it is not a safetensors file.
ATTN_API std::map<std::string, std::string> load_metadata(const std::filesystem::path& path);

/// Writes a safetensors file, every tensor whole and contiguous; the path must end in
/// `.safetensors`. Of names for one and the same tensor, as in a tied model, the first is written
/// and the metadata name it for the others, as `safetensors.torch.load_model` expects.
///
/// The file is written beside its place, synced and renamed: whatever fails, an old file stays
/// whole. It keeps the old file's permissions; a symbolic link keeps pointing where it points.
///
/// @throws c10::ValueError for another extension or a tensor that the format has no place for;
/// c10::Error when writing fails.
ATTN_API void save_weights(const StateDict& state, const std::filesystem::path& path,
                           const SaveWeightsOptions& options = {});

}  // namespace attn
