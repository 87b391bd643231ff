// embed_text MODEL IDS OUT: a BERT-type encoder made of attn's blocks, with trained weights.
//
// MODEL is a safetensors file with Hugging Face's names; IDS holds `ids` and `mask` [B, T] (1 = a
// token, 0 = padding); OUT gets `hidden` [B, T, C]. Bidirectional, post-LN, exact GELU: what a GPT
// does not use of the blocks.
#include <attn/modules/layer_norm.h>
#include <attn/modules/transformer_block.h>
#include <attn/weights.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <iostream>
#include <string>

namespace {

using attn::StateDict;
using attn::Tensor;

constexpr int64_t kHeads = 12;
constexpr double kEps = 1e-12;

// "encoder.layer.N." in our names: query, key and value in one matrix.
StateDict block_of(const StateDict& bert, const std::string& layer) {
  const auto named = [&](const std::string& name) -> const Tensor& { return bert[layer + name]; };
  StateDict block("block");
  const auto both = [&](const std::string& ours, const std::string& theirs) {
    for (const auto* part : {".weight", ".bias"}) block.insert(ours + part, named(theirs + part));
  };
  const auto norm = [&](const std::string& ours, const std::string& theirs) {
    block.insert(ours + ".scale", named(theirs + ".weight"));
    block.insert(ours + ".shift", named(theirs + ".bias"));
  };
  norm("ln1", "attention.output.LayerNorm");
  for (const auto* part : {".weight", ".bias"}) {
    const std::string self = "attention.self.";
    block.insert(std::string("attn.qkv") + part,
                 at::cat({named(self + "query" + part), named(self + "key" + part),
                          named(self + "value" + part)}));
  }
  both("attn.out_proj", "attention.output.dense");
  norm("ln2", "output.LayerNorm");
  both("mlp.fc1", "intermediate.dense");
  both("mlp.fc2", "output.dense");
  return block;
}

Tensor embed(const StateDict& bert, const Tensor& ids) {
  const auto table = [&](const char* name) {
    return bert["embeddings." + std::string(name) + "_embeddings.weight"];
  };
  const auto x = at::embedding(table("word"), ids) + table("position").narrow(0, 0, ids.size(1)) +
                 table("token_type")[0];  // [B, T, C]
  attn::LayerNorm norm(attn::LayerNormOptions(x.size(-1)).eps(kEps));
  StateDict weights("norm");
  weights.insert("scale", Tensor(bert["embeddings.LayerNorm.weight"]));
  weights.insert("shift", Tensor(bert["embeddings.LayerNorm.bias"]));
  attn::load_state_dict(*norm, weights);
  return norm(x);
}

void run(const std::string& model, const std::string& input, const std::string& output) {
  const auto bert = attn::load_weights(model), given = attn::load_weights(input);
  const auto padding = given["mask"] == 0;  // [B, T]
  auto h = embed(bert, given["ids"]);
  const auto width = bert["encoder.layer.0.intermediate.dense.weight"].size(0);
  const auto options = attn::BlockOptions()
                           .d_model(h.size(-1))
                           .num_heads(kHeads)
                           .context_length(h.size(1))
                           .mlp_expansion(width / h.size(-1))
                           .pre_ln(false)
                           .causal(false)
                           .layer_norm_eps(kEps)
                           .activation(attn::Activation::gelu);
  for (int layer = 0;; ++layer) {
    const auto name = "encoder.layer." + std::to_string(layer) + ".";
    if (!bert.contains(name + "output.dense.weight")) break;
    attn::TransformerBlock block(options);
    attn::load_state_dict(*block, block_of(bert, name));
    block->eval();
    h = block(h, padding);
  }
  StateDict result("result");
  result.insert("hidden", h);
  attn::save_weights(result, output);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: embed_text MODEL IDS OUT\n";
    return 2;
  }
  try {
    const c10::InferenceMode inference;
    run(argv[1], argv[2], argv[3]);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
}
