#pragma once

#include <attn/byte_level_bpe.h>
#include <attn/export.h>
#include <attn/generation.h>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <filesystem>
#include <memory>
#include <optional>

namespace attn {

/// A language model, and the tokenizer that its folder holds.
struct LanguageModel {
  std::shared_ptr<CausalLM> model;  ///< a GPTImpl or a TinyAttentionLMImpl, in eval mode
  std::optional<ByteLevelBPE> tokenizer;
};

/// Opens what `save_language_model` or `transformers` wrote: a folder, or a weights file with its
/// config.json beside it. A training run's folder stands for its best checkpoint, `best`.
///
///  - "model_type": "gpt2" in config.json: `load_gpt2`;
///  - "model_type": "attn_tiny_attention_lm": a TinyAttentionLM;
///  - tokenizer.json, or vocab.json and merges.txt: the tokenizer, whose tokens the model must
///  have.
///
/// @throws c10::ValueError, which names the file and what does not fit.
ATTN_API LanguageModel load_language_model(const std::filesystem::path& path,
                                           c10::Device device = c10::kCPU,
                                           c10::ScalarType dtype = c10::kFloat);

/// Writes config.json and model.safetensors, and vocab.json and merges.txt if there is a tokenizer,
/// into the folder; each file is written beside and renamed. A GPT's folder opens in
/// `transformers`.
///
/// @code
/// attn::GPT model(attn::GPTOptions().vocab_size(256).context_length(32).d_model(32).num_heads(2)
///                     .num_layers(2));
/// const auto folder = std::filesystem::temp_directory_path() / "attn_language_model_example";
/// attn::save_language_model(*model, attn::ByteLevelBPE::bytes(), folder);
/// auto [again, tokenizer] = attn::load_language_model(folder);
/// std::string text = tokenizer->decode(tokenizer->encode("to be"));  // "to be"
/// std::filesystem::remove_all(folder);
/// @endcode
///
/// @throws c10::ValueError for a model of another class, one that GPT-2's format has no place for
/// (see `save_gpt2`), or a tokenizer with more tokens than the model; c10::Error when writing
/// fails.
ATTN_API void save_language_model(const torch::nn::Module& model,
                                  const std::optional<ByteLevelBPE>& tokenizer,
                                  const std::filesystem::path& folder);

}  // namespace attn
