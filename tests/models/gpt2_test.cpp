#include "attn/models/gpt2.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/golden.h"
#include "support/mentions.h"
#include "support/temporary_folder.h"

#include <attn/weights.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>

namespace attn::testing {
namespace {

namespace fs = std::filesystem;

const fs::path kGolden = ATTN_GOLDEN_DIR;

double difference(GPT& model, const Golden& golden) {
  const torch::NoGradGuard no_grad;
  return (model(golden["ids"]) - golden["logits"]).abs().max().item<double>();
}

TEST(GPT2, AnswersAsTransformersDoes) {
  const auto golden = load_golden("expected_gpt2");
  for (const auto* name : {"gpt2", "gpt2_bin", "gpt2/model.safetensors"}) {
    SCOPED_TRACE(name);
    auto model = load_gpt2(kGolden / name, torch::kCPU, torch::kFloat64);
    EXPECT_FALSE(model->is_training());
    EXPECT_LT(difference(model, golden), 1e-10);
    EXPECT_TRUE(
        all_equal(generate(model, golden["prompt"], {.max_new_tokens = 11, .temperature = 0.0}),
                  golden["greedy"]));
    auto single = load_gpt2(kGolden / name);
    EXPECT_EQ(single->tok_embed->weight.scalar_type(), torch::kFloat32);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(
        all_close(single(golden["ids"]).to(torch::kFloat64), golden["logits"], {1e-5, 1e-4}));
  }
}

// The reference is strong enough: any one matrix the wrong way round, or the other GELU, shows.
TEST(GPT2, AnyMistakeInOneMatrixShows) {
  const auto golden = load_golden("expected_gpt2");
  const auto original = load_gpt2(kGolden / "gpt2", torch::kCPU, torch::kFloat64);
  for (const auto& item : original->named_parameters()) {
    if (item.value().dim() != 2 || item.key().find("embed") != std::string::npos) continue;
    auto model = GPT(std::dynamic_pointer_cast<GPTImpl>(original->clone()));
    {
      const torch::NoGradGuard no_grad;
      const auto parameters = model->named_parameters();
      const auto& weight = parameters[item.key()];
      weight.copy_(weight.t().contiguous().reshape(weight.sizes()));
    }
    EXPECT_GT(difference(model, golden), 1e-2) << item.key();
  }
  GPT exact(GPTOptions(original->options).activation(Activation::gelu));
  exact->to(torch::kFloat64);
  exact->eval();
  load_state_dict(*exact, state_dict(*original));
  EXPECT_GT(difference(exact, golden), 1e-5);
}

class GPT2Files : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::copy(kGolden / "gpt2", folder_.path(), fs::copy_options::recursive);
    config_ = nlohmann::json::parse(read_bytes(folder_ / "config.json"));
    weights_ = load_weights(kGolden / "gpt2");
  }
  std::string refusal_of_config(const char* key, const nlohmann::json& value) {
    auto changed = config_;
    changed[key] = value;
    write_bytes(folder_ / "config.json", changed.dump());
    return value_error([&] { load_gpt2(folder_.path()); });
  }
  std::string refusal_of_weights(const StateDict& state) {
    save_weights(state, folder_ / "model.safetensors");
    return value_error([&] { load_gpt2(folder_.path()); });
  }
  TemporaryFolder folder_;
  nlohmann::json config_;
  StateDict weights_;
};

TEST_F(GPT2Files, RefuseByNameWhatGPTDoesNotDo) {
  const auto refused = [&](const char* key, const nlohmann::json& value) {
    return mentions(refusal_of_config(key, value), {"config.json", key});
  };
  EXPECT_TRUE(refused("model_type", "llama"));
  EXPECT_TRUE(refused("scale_attn_weights", false));
  EXPECT_TRUE(refused("scale_attn_by_inverse_layer_idx", true));
  EXPECT_TRUE(refused("add_cross_attention", true));
  EXPECT_TRUE(refused("activation_function", "swish"));
  EXPECT_TRUE(refused("n_inner", 13));
  EXPECT_TRUE(refused("n_head", 5));
  EXPECT_TRUE(refused("attn_pdrop", 0.5));
  EXPECT_TRUE(refused("n_layer", -1));
  EXPECT_TRUE(refused("n_layer", 1.5));
  EXPECT_TRUE(refused("n_embd", "12"));
  EXPECT_TRUE(refused("vocab_size", 1e30));
  EXPECT_TRUE(refused("tie_word_embeddings", 1));
  EXPECT_TRUE(refused("layer_norm_epsilon", -1));
}

TEST_F(GPT2Files, RefuseSizesThatTheWeightsDoNotHaveBeforeAllocating) {
  EXPECT_TRUE(mentions(refusal_of_config("vocab_size", 2'000'000'000), {"wte.weight", "[31, 12]"}));
  EXPECT_TRUE(mentions(refusal_of_config("n_positions", 2'000'000'000), {"wpe.weight"}));
  EXPECT_TRUE(mentions(refusal_of_config("n_layer", 2'000'000'000), {"n_layer"}));
  EXPECT_TRUE(mentions(refusal_of_config("n_layer", 3), {"h.2."}));
  EXPECT_TRUE(mentions(refusal_of_config("n_layer", 1), {"only", "h.1."}));
  EXPECT_TRUE(mentions(refusal_of_config("n_inner", 24), {"mlp.c_fc.weight"}));
}

TEST_F(GPT2Files, RefuseMissingConflictingAndOtherTensors) {
  StateDict without("w"), untied("w"), extra("w"), differing("w");
  for (const auto& item : weights_) {
    if (item.key() != "transformer.h.1.ln_2.bias") without.insert(item.key(), item.value());
    if (item.key() != "lm_head.weight") untied.insert(item.key(), item.value());
    if (item.key() != "lm_head.weight") differing.insert(item.key(), item.value());
    extra.insert(item.key(), item.value());
  }
  EXPECT_TRUE(mentions(refusal_of_weights(without), {"h.1.ln_2.bias"}));
  extra.insert("transformer.h.0.attn.q_norm", torch::ones({1}));
  EXPECT_TRUE(mentions(refusal_of_weights(extra), {"q_norm"}));
  differing.insert("lm_head.weight", torch::ones({31, 12}));
  EXPECT_TRUE(mentions(refusal_of_weights(differing), {"tied"}));
  save_weights(untied, folder_ / "model.safetensors");
  EXPECT_NO_THROW(load_gpt2(folder_.path()));
  EXPECT_TRUE(mentions(refusal_of_config("tie_word_embeddings", false), {"lm_head.weight"}));
  fs::remove(folder_ / "config.json");
  EXPECT_TRUE(mentions(value_error([&] { load_gpt2(folder_.path()); }), {"config.json"}));
}

TEST_F(GPT2Files, RoundTripBitForBit) {
  for (const bool tied : {true, false}) {
    torch::manual_seed(1);
    GPT model(GPTOptions()
                  .vocab_size(31)
                  .context_length(16)
                  .d_model(12)
                  .num_heads(3)
                  .num_layers(2)
                  .mlp_expansion(2)
                  .weight_tying(tied)
                  .layer_norm_eps(1e-6)
                  .activation(Activation::relu)
                  .dropout(0.25));
    const auto path = folder_ / "saved";
    save_gpt2(*model, path);
    const auto again = load_gpt2(path);
    const auto expected = state_dict(*model), actual = state_dict(*again);
    ASSERT_EQ(actual.keys(), expected.keys());
    for (const auto& item : expected)
      EXPECT_TRUE(all_equal(actual[item.key()], item.value())) << item.key();
    EXPECT_EQ(again->options.activation(), Activation::relu);
    EXPECT_EQ(again->options.layer_norm_eps(), 1e-6);
    EXPECT_EQ(again->options.dropout(), 0.25);
    EXPECT_EQ(again->options.weight_tying(), tied);
  }
  GPT bare(GPTOptions()
               .vocab_size(31)
               .context_length(16)
               .d_model(12)
               .num_heads(3)
               .num_layers(1)
               .use_bias(false));
  EXPECT_TRUE(mentions(value_error([&] { save_gpt2(*bare, folder_ / "bare"); }), {"use_bias"}));
}

}  // namespace
}  // namespace attn::testing
