#pragma once

/// Weights in files: safetensors and PyTorch's `state_dict` files, both ways.
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
  /// The state_dict's key in a checkpoint dict: "model" of `torch.save({"model": ...})`. Empty: the
  /// dict itself, or the only state_dict in it.
  std::string key;
};

struct SaveWeightsOptions {
  /// safetensors' `__metadata__`. "format" is "pt" unless given here: transformers asks for it.
  std::map<std::string, std::string> metadata;
};

/// The tensors of a file, recognised by its content, not its name:
///  - safetensors, in the order of the data in the file. A name that a tied model left out (see
///    `save_weights`) is there again, sharing the kept tensor;
///  - PyTorch's zip format, `torch.save(model.state_dict(), path)`, in the file's order: a
///    plain dict or OrderedDict of tensors, or a checkpoint dict that holds one. Shared storage
///    stays shared. The pickle in it is read by an interpreter that knows tensors and plain values;
///    anything else is refused by its name, and nothing in a file can make it run code;
///  - an index of shards beside it (`model.safetensors.index.json`), with exactly its names;
///  - a folder: `model.safetensors`, its index, `pytorch_model.bin`, or its index.
///
/// On the CPU the tensors alias a private memory map: opening is fast whatever the size, pages are
/// read when touched, and writing to a tensor does not change the file. While they live the file
/// may be replaced (as `save_weights` does) but must not be truncated or written in place.
///
/// @throws c10::ValueError, which names the file, when it can't be read, is damaged, hostile or of
/// another kind, when `key` is not in it, or when there is none and several state_dicts are.
ATTN_API StateDict load_weights(const std::filesystem::path& path,
                                const LoadWeightsOptions& options = {});

/// The `__metadata__` of a safetensors file; empty if it has none.
/// @throws c10::ValueError if it is not a safetensors file.
ATTN_API std::map<std::string, std::string> load_metadata(const std::filesystem::path& path);

/// Writes the tensors by the path's extension, which must be `.safetensors`, or `.pt`, `.pth` or
/// `.bin` for PyTorch's format, which `torch.load(path, weights_only=True)` reads as a dict.
///
/// safetensors: every tensor whole and contiguous. Of names for one and the same tensor, as in a
/// tied model, the first is written and the metadata name it for the others, as
/// `safetensors.torch.load_model` expects. PyTorch's format: shared storage stays shared, and is
/// written whole; strides are kept; there is no place for metadata.
///
/// The file is written beside its place, synced and renamed: whatever fails, an old file stays
/// whole. It keeps the old file's permissions; a symbolic link keeps pointing where it points.
///
/// @throws c10::ValueError for another extension, a tensor that the format has no place for, or
/// metadata for PyTorch's format; c10::Error when writing fails.
ATTN_API void save_weights(const StateDict& state, const std::filesystem::path& path,
                           const SaveWeightsOptions& options = {});

}  // namespace attn
