#include "attn/state_dict.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/mentions.h"

#include <attn/models/gpt.h>
#include <attn/models/tiny_attention_lm.h>
#include <attn/modules/self_attention.h>
#include <attn/modules/transformer_block.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace attn::testing {
namespace {

using Keys = std::vector<std::string>;

/// Copies of the values, to see later that nothing changed.
StateDict snapshot(const torch::nn::Module& module) {
  StateDict copy;
  for (const auto& entry : state_dict(module)) copy.insert(entry.key(), entry.value().clone());
  return copy;
}

void expect_values(const torch::nn::Module& module, const StateDict& expected) {
  const auto state = state_dict(module);
  ASSERT_EQ(state.keys(), expected.keys());
  for (const auto& entry : expected) {
    EXPECT_TRUE(all_equal(state[entry.key()], entry.value())) << entry.key();
  }
}

/// The dict without some keys.
StateDict without(const StateDict& state, const Keys& keys) {
  StateDict rest;
  for (const auto& entry : state) {
    if (std::find(keys.begin(), keys.end(), entry.key()) == keys.end()) {
      rest.insert(entry.key(), entry.value());
    }
  }
  return rest;
}

/// The dict with another tensor under a key.
StateDict with(const StateDict& state, const std::string& key, const torch::Tensor& value) {
  StateDict changed;
  for (const auto& entry : state) {
    changed.insert(entry.key(), entry.key() == key ? value : entry.value());
  }
  if (!changed.contains(key)) changed.insert(key, value);
  return changed;
}

class StateDictTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(7); }

  static TransformerBlock block() {
    return TransformerBlock(BlockOptions().d_model(12).num_heads(3).context_length(8));
  }
  static std::string refusal(torch::nn::Module& module, const StateDict& state,
                             const LoadStateDictOptions& options = {}) {
    return value_error([&] { load_state_dict(module, state, options); });
  }
};

TEST_F(StateDictTest, HasPythonsKeysInPythonsOrderAtEveryDepth) {
  const BlockStack stack(BlockOptions().d_model(12).num_heads(3).use_bias(false), /*depth=*/2);
  Keys expected = {"embed.weight"};
  for (const std::string prefix : {"blocks.0.", "blocks.1."}) {
    for (const auto* key : {"ln1.scale", "ln1.shift", "attn.qkv.weight", "attn.out_proj.weight",
                            "ln2.scale", "ln2.shift", "mlp.fc1.weight", "mlp.fc2.weight"}) {
      expected.push_back(prefix + key);
    }
  }
  expected.insert(expected.end(), {"final_ln.scale", "final_ln.shift"});
  EXPECT_EQ(state_dict(*stack).keys(), expected);
}

TEST_F(StateDictTest, ListsBuffersAfterTheParametersOfTheirModule) {
  const torch::nn::Sequential module(torch::nn::BatchNorm1d(4), SelfAttention(4, 2));
  EXPECT_EQ(state_dict(*module).keys(),
            Keys({"0.weight", "0.bias", "0.running_mean", "0.running_var", "0.num_batches_tracked",
                  "1.qkv.weight", "1.proj.weight"}));
}

TEST_F(StateDictTest, SharesStorageWithoutHistory) {
  auto module = block();
  const auto state = state_dict(*module);
  for (const auto& parameter : module->named_parameters()) {
    const auto& entry = state[parameter.key()];
    EXPECT_EQ(entry.data_ptr(), parameter.value().data_ptr()) << parameter.key();
    EXPECT_FALSE(entry.requires_grad()) << parameter.key();
    EXPECT_TRUE(parameter.value().requires_grad()) << parameter.key();
  }
  state["ln1.shift"].fill_(3.0);
  EXPECT_EQ(module->ln1->shift[0].item<float>(), 3.0f);
}

TEST_F(StateDictTest, LoadsWhatAnotherModuleHad) {
  const auto source = block();
  auto target = block();
  const auto report = load_state_dict(*target, state_dict(*source));
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.to_string(), "every key matches");
  expect_values(*target, snapshot(*source));
  EXPECT_NE(target->ln1->scale.data_ptr(), source->ln1->scale.data_ptr());
}

TEST_F(StateDictTest, LoadsWhateverTheOrderAndStrides) {
  const auto source = block();
  auto target = block();
  StateDict reversed;
  const auto state = state_dict(*source);
  for (size_t i = state.size(); i-- > 0;) {
    const auto& x = state[i].value();
    reversed.insert(state[i].key(), x.dim() == 2 ? x.t().contiguous().t() : x);
  }
  load_state_dict(*target, reversed);
  expect_values(*target, snapshot(*source));
  EXPECT_TRUE(target->mlp->fc1->weight.is_contiguous());
}

TEST_F(StateDictTest, LoadsBuffersToo) {
  torch::nn::BatchNorm1d source(4), target(4);
  source(torch::randn({8, 4}));
  load_state_dict(*target, state_dict(*source));
  EXPECT_TRUE(all_equal(target->running_mean, source->running_mean));
  EXPECT_EQ(target->num_batches_tracked.item<int64_t>(), 1);
}

TEST_F(StateDictTest, LoadingAModulesOwnChangesNothing) {
  auto module = block();
  const auto before = snapshot(*module);
  EXPECT_TRUE(load_state_dict(*module, state_dict(*module)).ok());
  expect_values(*module, before);
}

TEST_F(StateDictTest, LoadingKeepsTensorsFlagsAndOptimiserState) {
  auto module = block();
  module->ln1->scale.requires_grad_(false);
  torch::optim::Adam optimizer(module->parameters());
  module(torch::randn({2, 5, 12})).sum().backward();
  optimizer.step();
  const auto before = module->parameters();
  const auto gradient = module->ln1->shift.grad();

  load_state_dict(*module, state_dict(*block()));
  const auto after = module->parameters();
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(after[i].is_same(before[i])) << i;
  EXPECT_FALSE(module->ln1->scale.requires_grad());
  EXPECT_TRUE(module->ln1->shift.requires_grad());
  EXPECT_TRUE(module->ln1->shift.is_leaf());
  EXPECT_TRUE(module->ln1->shift.grad().is_same(gradient));
  const auto* shift = module->ln1->shift.unsafeGetTensorImpl();
  EXPECT_EQ(optimizer.state().count(const_cast<c10::TensorImpl*>(shift)), 1u);
}

TEST_F(StateDictTest, StrictLoadingNamesEveryFaultAtOnceAndChangesNothing) {
  auto module = block();
  const auto before = snapshot(*module);
  auto state = without(state_dict(*block()), {"ln2.shift", "attn.qkv.bias"});
  state.insert("attn.bias", torch::ones({8, 8}));
  state.insert("extra", torch::ones({1}));
  state = with(state, "mlp.fc1.weight", torch::ones({47, 12}));
  state = with(state, "ln1.scale", torch::ones({}));
  state = with(state, "mlp.fc2.bias", torch::ones({12}, torch::kFloat64));
  state = with(state, "mlp.fc1.bias", torch::Tensor());

  const auto message = refusal(*module, state);
  EXPECT_TRUE(mentions(message, {"2 missing", "2 unexpected", "4 mismatched"}));
  EXPECT_TRUE(mentions(message, {"ln2.shift", "attn.qkv.bias", "attn.bias", "extra"}));
  EXPECT_TRUE(mentions(message, {"mlp.fc1.weight: shape must be [48, 12], got [47, 12]",
                                 "ln1.scale: shape must be [12], got []",
                                 "mlp.fc2.bias: dtype must be Float, got Double",
                                 "mlp.fc1.bias: must be a tensor, got an undefined one"}));
  expect_values(*module, before);
}

TEST_F(StateDictTest, StrictLoadingRefusesEachFaultAlone) {
  auto module = block();
  const auto before = snapshot(*module);
  const auto good = snapshot(*block());
  EXPECT_TRUE(mentions(refusal(*module, without(good, {"ln2.scale"})), {"1 missing", "ln2.scale"}));
  EXPECT_TRUE(mentions(refusal(*module, with(good, "ln3.scale", torch::ones({12}))),
                       {"1 unexpected", "ln3.scale"}));
  EXPECT_TRUE(mentions(refusal(*module, with(good, "ln1.scale", torch::ones({6}))),
                       {"ln1.scale", "[12]", "got [6]"}));
  EXPECT_TRUE(mentions(refusal(*module, StateDict()), {"12 missing"}));
  expect_values(*module, before);
}

TEST_F(StateDictTest, LooseLoadingReportsKeysAndLoadsTheRest) {
  auto module = block();
  const auto before = snapshot(*module);
  auto state = without(snapshot(*block()), {"ln2.shift", "mlp.fc1.weight"});
  state.insert("attn.bias", torch::ones({8, 8}));

  const auto report = load_state_dict(*module, state, {.strict = false});
  EXPECT_FALSE(report.ok());
  EXPECT_EQ(report.missing_keys, Keys({"ln2.shift", "mlp.fc1.weight"}));
  EXPECT_EQ(report.unexpected_keys, Keys({"attn.bias"}));
  EXPECT_TRUE(report.mismatched.empty());
  EXPECT_TRUE(mentions(report.to_string(), {"2 missing", "mlp.fc1.weight", "attn.bias"}));
  for (const auto& entry : state_dict(*module)) {
    const auto* loaded = state.find(entry.key());
    EXPECT_TRUE(all_equal(entry.value(), loaded ? *loaded : before[entry.key()])) << entry.key();
  }
}

TEST_F(StateDictTest, LooseLoadingStillRefusesShapesDtypesAndUndefinedTensors) {
  auto module = block();
  const auto before = snapshot(*module);
  const auto good = snapshot(*block());
  const std::pair<torch::Tensor, std::string> faults[] = {
      {torch::ones({1, 12}), "ln1.scale: shape must be [12], got [1, 12]"},
      {torch::ones({12}, torch::kFloat64), "ln1.scale: dtype must be Float, got Double"},
      {torch::ones({12}, torch::kMeta), "ln1.scale: must be a dense tensor"},
      {torch::ones({12}).to_sparse(), "ln1.scale: must be a dense tensor"},
      {torch::Tensor(), "ln1.scale: must be a tensor, got an undefined one"},
  };
  for (const auto& [value, fault] : faults) {
    EXPECT_TRUE(mentions(refusal(*module, with(good, "ln1.scale", value), {.strict = false}),
                         {"1 mismatched", fault}));
  }
  expect_values(*module, before);
}

TEST_F(StateDictTest, ConvertsFloatingPointWhenAskedAndNothingElse) {
  auto module = block();
  auto source = block();
  source->to(torch::kFloat64);
  const auto state = state_dict(*source);
  EXPECT_TRUE(mentions(refusal(*module, state), {"12 mismatched", "dtype must be Float"}));

  EXPECT_TRUE(load_state_dict(*module, state, {.convert_dtype = true}).ok());
  source->to(torch::kFloat32);
  expect_values(*module, snapshot(*source));
  EXPECT_EQ(module->ln1->scale.scalar_type(), torch::kFloat32);

  const auto before = snapshot(*module);
  for (const auto dtype : {torch::kLong, torch::kBool, torch::kComplexFloat}) {
    EXPECT_TRUE(mentions(refusal(*module, with(before, "ln1.scale", torch::ones({12}, dtype)),
                                 {.convert_dtype = true}),
                         {"ln1.scale: dtype must be Float", c10::toString(dtype)}));
  }
  expect_values(*module, before);
}

// torch::load makes a parameter of such a file the file's dtype, and reads past its end.
TEST_F(StateDictTest, ANarrowerDtypeIsConvertedNotReinterpreted) {
  auto module = block();
  const auto narrow = torch::randn({12}).to(torch::kBFloat16);
  load_state_dict(*module, with(snapshot(*module), "ln1.scale", narrow), {.convert_dtype = true});
  EXPECT_TRUE(all_equal(module->ln1->scale, narrow.to(torch::kFloat32)));
}

TEST_F(StateDictTest, APartOfAModelLoadsByItself) {
  TinyAttentionLM source(20, 12, 3, 8), target(20, 12, 3, 8);
  load_state_dict(*target->attn, state_dict(*source->attn));
  EXPECT_TRUE(all_equal(target->attn->qkv_proj->weight, source->attn->qkv_proj->weight));
  EXPECT_FALSE(all_close(target->lm_head->weight, source->lm_head->weight));
}

// A model with a tied model inside, followed by something else.
struct Wrapper : torch::nn::Module {
  Wrapper() {
    lm = register_module("lm", GPT(GPTOptions()
                                       .vocab_size(20)
                                       .context_length(8)
                                       .d_model(12)
                                       .num_heads(3)
                                       .num_layers(1)
                                       .dropout(0.0)));
    probe = register_module("probe", torch::nn::Linear(12, 2));
  }
  GPT lm{nullptr};
  torch::nn::Linear probe{nullptr};
};

TEST_F(StateDictTest, ListsTiedWeightsWithTheirModuleAtAnyDepth) {
  const Wrapper model;
  const auto state = state_dict(model);
  const auto keys = state.keys();
  const auto alias = std::find(keys.begin(), keys.end(), "lm.lm_head.weight");
  ASSERT_NE(alias, keys.end());
  EXPECT_EQ(*(alias - 1), "lm.final_ln.shift");
  EXPECT_EQ(*(alias + 1), "probe.weight");
  EXPECT_EQ(state["lm.lm_head.weight"].data_ptr(), state["lm.tok_embed.weight"].data_ptr());
}

TEST_F(StateDictTest, LoadsTiedWeightsByEitherNameAtAnyDepth) {
  const Wrapper source;
  const auto full = snapshot(source);
  for (const Keys& left_out : {Keys{}, Keys{"lm.lm_head.weight"}, Keys{"lm.tok_embed.weight"}}) {
    Wrapper target;
    EXPECT_TRUE(load_state_dict(target, without(full, left_out)).ok());
    expect_values(target, full);
  }
}

TEST_F(StateDictTest, ReportsEachNameOfATiedWeightTruthfully) {
  Wrapper target;
  const auto before = snapshot(target);
  const auto other = snapshot(Wrapper());
  const std::string name = "lm.tok_embed.weight", alias = "lm.lm_head.weight";
  EXPECT_TRUE(mentions(refusal(target, without(other, {name, alias})), {"2 missing", name, alias}));
  EXPECT_TRUE(mentions(refusal(target, with(other, alias, torch::ones({20, 11}))),
                       {"0 missing", "1 mismatched", alias + ": shape must be [20, 12]"}));
  EXPECT_TRUE(mentions(refusal(target, with(other, name, torch::ones({20, 11}))),
                       {"0 missing", "1 mismatched", name + ": shape must be [20, 12]"}));
  auto differing = other[alias].clone();
  differing[19][11] += 1e-3;
  EXPECT_TRUE(mentions(refusal(target, with(other, alias, differing), {.strict = false}),
                       {"1 mismatched", alias, "tied"}));
  expect_values(target, before);
}

}  // namespace
}  // namespace attn::testing
