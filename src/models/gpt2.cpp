#include "attn/models/gpt2.h"

#include "attn/weights.h"
#include "model_config.h"
#include "weights/in_quotes.h"
#include "weights/output_file.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include <array>
#include <cmath>
#include <unordered_set>

namespace attn {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using weights::in_quotes;

// ---- The configuration

struct NamedActivation {
  const char* name;
  Activation activation;
};
// The first of a kind is the one that is written.
constexpr std::array kActivations = {
    NamedActivation{"gelu_new", Activation::gelu_tanh},
    NamedActivation{"gelu_pytorch_tanh", Activation::gelu_tanh},
    NamedActivation{"gelu", Activation::gelu},
    NamedActivation{"relu", Activation::relu},
};

// config.json, whose defaults are those of transformers' GPT2Config.
class Config : public ModelConfig {
 public:
  explicit Config(const fs::path& path) : ModelConfig(path) { check_kind(); }

  GPTOptions options() const;

 private:
  // What GPT does not do, by its name.
  void check_kind() const {
    const auto kind = text("model_type", "gpt2");
    TORCH_CHECK_VALUE(kind == "gpt2", name(), ": model_type must be gpt2, got ", in_quotes(kind));
    TORCH_CHECK_VALUE(flag("scale_attn_weights", true), name(),
                      ": scale_attn_weights must be true, got false");
    for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"}) {
      TORCH_CHECK_VALUE(!flag(key, false), name(), ": ", key, " must be false, got true");
    }
  }
  Activation activation() const {
    const auto wanted = text("activation_function", kActivations[0].name);
    for (const auto& known : kActivations) {
      if (wanted == known.name) return known.activation;
    }
    C10_THROW_ERROR(
        ValueError,
        c10::str(name(),
                 ": activation_function must be gelu_new, gelu_pytorch_tanh, gelu or relu, got ",
                 in_quotes(wanted)));
  }
  double dropout() const {
    const double p = number("resid_pdrop", 0.1, 0.0, 1.0);
    for (const char* key : {"embd_pdrop", "attn_pdrop"}) {
      const double other = number(key, 0.1, 0.0, 1.0);
      TORCH_CHECK_VALUE(other == p, name(), ": ", key, " must be resid_pdrop (", p, "), got ",
                        other);
    }
    return p;
  }
};

GPTOptions Config::options() const {
  const int64_t C = size("n_embd", 768), inner = size("n_inner", 4 * C), H = size("n_head", 12);
  TORCH_CHECK_VALUE(C % H == 0, name(), ": n_embd must be a multiple of n_head (", H, "), got ", C);
  TORCH_CHECK_VALUE(inner % C == 0, name(), ": n_inner must be a multiple of n_embd (", C,
                    "), got ", inner);
  return GPTOptions()
      .vocab_size(size("vocab_size", 50257))
      .context_length(size("n_positions", size("n_ctx", 1024)))
      .d_model(C)
      .num_heads(H)
      .num_layers(size("n_layer", 12))
      .mlp_expansion(inner / C)
      .dropout(dropout())
      .weight_tying(flag("tie_word_embeddings", true))
      .layer_norm_eps(number("layer_norm_epsilon", 1e-5, 0.0, 1.0))
      .activation(activation());
}

// ---- Names

struct Renamed {
  const char* gpt2;
  const char* ours;
  bool transposed;  // Conv1D holds [in, out]
};
constexpr std::array kOfBlock = {
    Renamed{"ln_1.weight", "ln1.scale", false},
    Renamed{"ln_1.bias", "ln1.shift", false},
    Renamed{"attn.c_attn.weight", "attn.qkv.weight", true},
    Renamed{"attn.c_attn.bias", "attn.qkv.bias", false},
    Renamed{"attn.c_proj.weight", "attn.out_proj.weight", true},
    Renamed{"attn.c_proj.bias", "attn.out_proj.bias", false},
    Renamed{"ln_2.weight", "ln2.scale", false},
    Renamed{"ln_2.bias", "ln2.shift", false},
    Renamed{"mlp.c_fc.weight", "mlp.fc1.weight", true},
    Renamed{"mlp.c_fc.bias", "mlp.fc1.bias", false},
    Renamed{"mlp.c_proj.weight", "mlp.fc2.weight", true},
    Renamed{"mlp.c_proj.bias", "mlp.fc2.bias", false},
};
constexpr std::array kOfModel = {
    Renamed{"wte.weight", "tok_embed.weight", false},
    Renamed{"wpe.weight", "pos_embed.weight", false},
    Renamed{"ln_f.weight", "final_ln.scale", false},
    Renamed{"ln_f.bias", "final_ln.shift", false},
};
constexpr std::string_view kPrefix = "transformer.";
constexpr const char* kHead = "lm_head.weight";

// Every tensor of a model of that many blocks: (GPT-2's name without prefix, ours, transposed).
template <typename Visit>
void each_tensor(int64_t num_layers, const Visit& visit) {
  const auto renamed = [&](const std::string& theirs, const std::string& ours,
                           const Renamed& tensor) {
    visit(theirs + tensor.gpt2, ours + tensor.ours, tensor.transposed);
  };
  renamed("", "", kOfModel[0]);
  renamed("", "", kOfModel[1]);
  for (int64_t i = 0; i < num_layers; ++i) {
    const auto number = std::to_string(i);
    for (const auto& tensor : kOfBlock)
      renamed("h." + number + ".", "blocks." + number + ".", tensor);
  }
  renamed("", "", kOfModel[2]);
  renamed("", "", kOfModel[3]);
}

bool is_old_mask(std::string_view name) {
  return name.starts_with("h.") &&
         (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"));
}

// Without the prefix and the masks that older files hold.
StateDict without_prefix(const StateDict& file, const std::string& name) {
  StateDict state("state_dict");
  for (const auto& item : file) {
    const std::string key =
        item.key().starts_with(kPrefix) ? item.key().substr(kPrefix.size()) : item.key();
    if (is_old_mask(key)) continue;
    TORCH_CHECK_VALUE(!state.contains(key), name, ": tensors must have names of their own, got ",
                      in_quotes(key), " with and without ", in_quotes(kPrefix));
    state.insert(key, item.value());
  }
  return state;
}

// The file's tensors are what the configuration says, before a model of that size is made.
void check_size(const StateDict& state, const GPTOptions& o, const std::string& name) {
  TORCH_CHECK_VALUE(o.num_layers() <= static_cast<int64_t>(state.size()), name,
                    ": the weights must be of n_layer (", o.num_layers(), ") blocks, got ",
                    state.size(), " tensors");
  const auto check = [&](const std::string& key, at::IntArrayRef shape) {
    const auto* tensor = state.find(key);
    TORCH_CHECK_VALUE(tensor != nullptr, name, ": the weights must hold ", in_quotes(key),
                      ", got none of that name");
    TORCH_CHECK_VALUE(tensor->sizes() == shape && tensor->is_floating_point(), name, ": ",
                      in_quotes(key), " must be floating-point ", shape, ", got ",
                      tensor->scalar_type(), " ", tensor->sizes());
    // A view of few bytes can have any shape.
    TORCH_CHECK_VALUE(tensor->nbytes() <= tensor->storage().nbytes(), name, ": ", in_quotes(key),
                      " must have its own ", tensor->nbytes(), " bytes, got ",
                      tensor->storage().nbytes());
  };
  const int64_t C = o.d_model(), inner = C * o.mlp_expansion();
  check("wte.weight", {o.vocab_size(), C});
  check("wpe.weight", {o.context_length(), C});
  for (int64_t i = 0; i < o.num_layers(); ++i) {
    const auto block = "h." + std::to_string(i) + ".";
    check(block + "attn.c_attn.weight", {C, 3 * C});
    check(block + "attn.c_proj.weight", {C, C});
    check(block + "mlp.c_fc.weight", {C, inner});
    check(block + "mlp.c_proj.weight", {inner, C});
  }
}

StateDict renamed(const StateDict& state, const GPTOptions& options, const std::string& name) {
  StateDict ours("state_dict");
  std::unordered_set<std::string> known = {kHead};
  each_tensor(options.num_layers(),
              [&](const std::string& theirs, const std::string& key, bool transposed) {
                const auto* tensor = state.find(theirs);
                TORCH_CHECK_VALUE(tensor != nullptr, name, ": the weights must hold ",
                                  in_quotes(theirs), ", got none of that name");
                ours.insert(key, transposed ? tensor->t() : *tensor);
                known.insert(theirs);
              });
  const auto* head = state.find(kHead);
  TORCH_CHECK_VALUE(head != nullptr || options.weight_tying(), name, ": the weights must hold ",
                    in_quotes(kHead), " where tie_word_embeddings is false, got none of that name");
  if (head != nullptr) ours.insert(kHead, Tensor(*head));
  for (const auto& item : state) {
    TORCH_CHECK_VALUE(known.contains(item.key()), name, ": the weights must be GPT-2's only, got ",
                      in_quotes(item.key()));
  }
  return ours;
}

}  // namespace

GPT load_gpt2(const fs::path& path, c10::Device device, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(c10::isFloatingType(dtype), "dtype must be floating-point, got ", dtype);
  std::error_code ignored;
  const auto folder = fs::is_directory(path, ignored) ? path : path.parent_path();
  const Config config(folder / "config.json");
  const auto options = config.options();
  const auto name = in_quotes(path.string());
  const auto state = without_prefix(load_weights(path), name);
  check_size(state, options, name);
  const auto ours = renamed(state, options, name);
  GPT model(options);
  model->to(device, dtype);
  load_state_dict(*model, ours, {.convert_dtype = true});
  model->eval();
  return model;
}

void save_gpt2(const GPTImpl& model, const fs::path& folder) {
  const auto& o = model.options;
  TORCH_CHECK_VALUE(o.use_bias(), "a GPT-2 must have biases, got use_bias = false");
  weights::make_folder(folder);
  const auto state = state_dict(model);
  StateDict theirs("state_dict");
  each_tensor(
      o.num_layers(), [&](const std::string& name, const std::string& ours, bool transposed) {
        const auto& tensor = state[ours];
        theirs.insert(std::string(kPrefix) + name, transposed ? tensor.t().contiguous() : tensor);
      });
  if (!o.weight_tying()) theirs.insert(kHead, state[kHead]);
  save_weights(theirs, folder / "model.safetensors");

  const char* activation = nullptr;
  for (const auto& known : kActivations) {
    if (activation == nullptr && known.activation == o.activation()) activation = known.name;
  }
  const json config = {{"model_type", "gpt2"},
                       {"architectures", {"GPT2LMHeadModel"}},
                       {"vocab_size", o.vocab_size()},
                       {"n_positions", o.context_length()},
                       {"n_embd", o.d_model()},
                       {"n_layer", o.num_layers()},
                       {"n_head", o.num_heads()},
                       {"n_inner", o.mlp_expansion() * o.d_model()},
                       {"activation_function", activation},
                       {"layer_norm_epsilon", o.layer_norm_eps()},
                       {"resid_pdrop", o.dropout()},
                       {"embd_pdrop", o.dropout()},
                       {"attn_pdrop", o.dropout()},
                       {"tie_word_embeddings", o.weight_tying()}};
  write_config(config, folder / "config.json");
}

}  // namespace attn
