#pragma once

#include <attn/export.h>
#include <attn/models/gpt.h>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <filesystem>

namespace attn {

/// A Hugging Face GPT-2: a folder with config.json and model.safetensors (one or sharded) or
/// pytorch_model.bin, or such a file with config.json beside it -> a GPT in eval mode, on `device`
/// in `dtype`.
///
/// Names with and without "transformer.", the old attention masks, tied and untied heads and the
/// Conv1D layers' transposed matrices are seen to. What the configuration asks for and GPT does not
/// do is refused by its name.
/// @throws c10::ValueError, which names the file and what does not fit.
ATTN_API GPT load_gpt2(const std::filesystem::path& path, c10::Device device = c10::kCPU,
                       c10::ScalarType dtype = c10::kFloat);

/// Writes config.json and model.safetensors into the folder, as `transformers` reads them. Each
/// file is written beside and renamed.
///
/// @code
/// attn::GPT model(attn::GPTOptions().vocab_size(31).context_length(16).d_model(12).num_heads(3)
///                     .num_layers(2));
/// const auto folder = std::filesystem::temp_directory_path() / "attn_gpt2_example";
/// attn::save_gpt2(*model, folder);
/// attn::GPT again = attn::load_gpt2(folder);
/// bool same = torch::equal(again->tok_embed->weight, model->tok_embed->weight);  // true
/// std::filesystem::remove_all(folder);
/// @endcode
///
/// @throws c10::ValueError for a model without biases, which GPT-2 has; c10::Error when writing
/// fails.
ATTN_API void save_gpt2(const GPTImpl& model, const std::filesystem::path& folder);

}  // namespace attn
