#include "attn/model_folder.h"

#include "attn/models/gpt2.h"
#include "attn/models/tiny_attention_lm.h"
#include "attn/weights.h"
#include "model_config.h"
#include "weights/in_quotes.h"
#include "weights/output_file.h"

#include <c10/util/Exception.h>

namespace attn {
namespace {

namespace fs = std::filesystem;
using weights::in_quotes;

constexpr const char* kTiny = "attn_tiny_attention_lm";

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// A run's folder has its models in folders of their own.
fs::path best_of(const fs::path& path) {
  return is_there(path / "config.json") || !is_there(path / "best" / "config.json") ? path
                                                                                    : path / "best";
}

std::shared_ptr<CausalLM> load_tiny(const ModelConfig& config, const fs::path& path,
                                    c10::Device device, c10::ScalarType dtype) {
  const auto state = load_weights(path);
  const auto V = config.size("vocab_size"), C = config.size("d_model"), H = config.size("n_heads"),
             limit = config.size("max_context_length");
  // Before a model of that size is made: the file must have it.
  const auto* embedding = state.find("token_emb.embedding.weight");
  TORCH_CHECK_VALUE(embedding != nullptr && embedding->sizes() == at::IntArrayRef({V, C}) &&
                        embedding->nbytes() <= embedding->storage().nbytes(),
                    in_quotes(path.string()), ": token_emb.embedding.weight must be [", V, ", ", C,
                    "] as config.json says, got ",
                    embedding == nullptr ? "none" : c10::str(embedding->sizes()));
  constexpr int64_t kLongest = int64_t{1} << 20;  // the table of positions is made, not read
  TORCH_CHECK_VALUE(limit <= kLongest, config.name(), ": max_context_length must be at most ",
                    kLongest, ", got ", limit);
  TinyAttentionLM model(TinyAttentionLMOptions(V, C, H, limit).causal(config.flag("causal", true)));
  model->to(device, dtype);
  load_state_dict(*model, state, {.convert_dtype = true});
  model->eval();
  return model.ptr();
}

std::optional<ByteLevelBPE> load_tokenizer(const fs::path& folder) {
  if (!is_there(folder / "tokenizer.json") && !is_there(folder / "vocab.json")) return std::nullopt;
  return ByteLevelBPE::from_folder(folder);
}

void check_vocabulary(const std::optional<ByteLevelBPE>& tokenizer, const CausalLM& model,
                      const fs::path& folder) {
  if (!tokenizer) return;
  TORCH_CHECK_VALUE(tokenizer->vocab_size() <= model.vocab_size(), in_quotes(folder.string()),
                    ": the tokenizer must have at most the model's ", model.vocab_size(),
                    " tokens, got ", tokenizer->vocab_size(),
                    "; take the tokenizer files that belong to the model");
}

}  // namespace

LanguageModel load_language_model(const fs::path& path, c10::Device device, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(c10::isFloatingType(dtype), "dtype must be floating-point, got ", dtype);
  TORCH_CHECK_VALUE(is_there(path), in_quotes(path.string()),
                    " must be a model's folder or weights file, got no such file");
  std::error_code ignored;
  const auto place = fs::is_directory(path, ignored) ? best_of(path) : path;
  const auto folder = fs::is_directory(place, ignored) ? place : place.parent_path();
  TORCH_CHECK_VALUE(is_there(folder / "config.json"), in_quotes(path.string()),
                    " must have a config.json ", folder == place ? "in it" : "beside it",
                    ", got none; attn::save_language_model and transformers' save_pretrained write "
                    "one");
  LanguageModel loaded;
  const ModelConfig config(folder / "config.json");
  const auto kind = config.text("model_type", "gpt2");
  TORCH_CHECK_VALUE(kind == "gpt2" || kind == kTiny, config.name(), ": model_type must be gpt2 or ",
                    kTiny, ", got ", in_quotes(kind));
  if (kind == kTiny) {
    loaded.model = load_tiny(config, place, device, dtype);
  } else {
    loaded.model = load_gpt2(place, device, dtype).ptr();
  }
  loaded.tokenizer = load_tokenizer(folder);
  check_vocabulary(loaded.tokenizer, *loaded.model, folder);
  return loaded;
}

void save_language_model(const torch::nn::Module& model,
                         const std::optional<ByteLevelBPE>& tokenizer, const fs::path& folder) {
  const auto* lm = dynamic_cast<const CausalLM*>(&model);
  const auto* tiny = dynamic_cast<const TinyAttentionLMImpl*>(&model);
  const auto* gpt = dynamic_cast<const GPTImpl*>(&model);
  TORCH_CHECK_VALUE(tiny != nullptr || gpt != nullptr,
                    "the model must be a GPT or a TinyAttentionLM, got ", model.name());
  check_vocabulary(tokenizer, *lm, folder);
  if (gpt != nullptr) {
    save_gpt2(*gpt, folder);
  } else {
    weights::make_folder(folder);
    save_weights(state_dict(*tiny), folder / "model.safetensors");
    write_config({{"model_type", kTiny},
                  {"vocab_size", tiny->options.vocab_size()},
                  {"d_model", tiny->options.d_model()},
                  {"n_heads", tiny->options.n_heads()},
                  {"max_context_length", tiny->options.max_context_length()},
                  {"causal", tiny->options.causal()}},
                 folder / "config.json");
  }
  if (tokenizer) tokenizer->save(folder);
}

}  // namespace attn
