#include "attn/models/gpt.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/golden.h"
#include "support/golden_module.h"
#include "support/implementations.h"
#include "support/mentions.h"

#include <attn/state_dict.h>
#include <attn/summary.h>

#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

namespace attn::testing {
namespace {

GPTOptions tiny() {
  return GPTOptions()
      .vocab_size(512)
      .context_length(64)
      .d_model(64)
      .num_heads(4)
      .num_layers(2)
      .dropout(0.0);
}

GPTOptions smaller() {
  return GPTOptions()
      .vocab_size(20)
      .context_length(8)
      .d_model(12)
      .num_heads(3)
      .num_layers(2)
      .dropout(0.0);
}

class GPTReference : public EachImplementation {
 protected:
  GPT make() {
    GPT model(tiny().implementation(GetParam()));
    set_parameters(*model, golden.with_prefix("weight."));
    return model;
  }
  Golden golden = load_golden("gpt_tiny");
};
ATTN_EACH_IMPLEMENTATION(GPTReference);

TEST_P(GPTReference, LogitsLossAndGradientsArePythons) {
  auto model = make();
  const auto& tokens = golden["tokens"];
  const auto logits = model(tokens);
  EXPECT_TRUE(all_close(logits, golden["logits"]));
  const auto loss = torch::nn::functional::cross_entropy(logits.narrow(1, 0, 8).flatten(0, 1),
                                                         tokens.narrow(1, 1, 8).flatten());
  EXPECT_TRUE(all_close(loss, golden["loss"]));
  loss.backward();
  expect_gradients_close(*model, golden.with_prefix("grad."));
}

TEST_P(GPTReference, GeneratesPythonsIdsWithAndWithoutCache) {
  auto model = make();
  for (const bool use_cache : {true, false}) {
    SCOPED_TRACE(use_cache);
    EXPECT_TRUE(all_equal(generate(model, golden["prompt"],
                                   {.max_new_tokens = 12,
                                    .temperature = 0.8,
                                    .top_k = 20,
                                    .seed = 42,
                                    .use_cache = use_cache}),
                          golden["generated"]));
    EXPECT_TRUE(
        all_equal(generate(model, golden["long_prompt"],
                           {.max_new_tokens = 4, .top_k = 10, .seed = 0, .use_cache = use_cache}),
                  golden["long_generated"]));
    const auto& crossing = golden["crossing_generated"];  // 60 + 12 tokens, context 64
    EXPECT_TRUE(
        all_equal(generate(model, crossing.narrow(1, 0, 60),
                           {.max_new_tokens = 12, .top_k = 50, .seed = 7, .use_cache = use_cache}),
                  crossing));
  }
}

TEST(GPT, DrawsPythonsWeights) {
  if (!draws_as_the_goldens()) GTEST_SKIP() << kOtherDraws;
  const auto golden = load_golden("gpt_tiny");
  torch::manual_seed(0);
  const GPT model(tiny());
  expect_parameters_equal(*model, golden.with_prefix("weight."));
  EXPECT_TRUE(all_equal(torch::randint(0, 512, {2, 9}), golden["tokens"]));  // and no more
}

TEST(GPT, PresetsHaveTheirSizes) {
  const auto count = [](const GPTOptions& o) {  // as the sum over its tensors
    const int64_t C = o.d_model(), inner = o.mlp_expansion() * C;
    const int64_t block =
        4 * C + (3 * C * C + 3 * C) + (C * C + C) + (C * inner + inner) + (inner * C + C);
    const int64_t tied = (o.vocab_size() + o.context_length()) * C + o.num_layers() * block + 2 * C;
    return o.weight_tying() ? tied : tied + o.vocab_size() * C;
  };
  EXPECT_EQ(count(GPTOptions::gpt2()), 124'439'808);
  EXPECT_EQ(count(GPTOptions::gpt2().weight_tying(false)), 163'037'184);
  EXPECT_EQ(count(GPTOptions::gpt2_medium()), 354'823'168);
  EXPECT_EQ(count(GPTOptions::gpt2_large()), 774'030'080);
  EXPECT_EQ(count(GPTOptions::gpt2_xl()), 1'557'611'200);
  for (const bool tied : {true, false}) {
    const auto options = tiny().weight_tying(tied);
    EXPECT_EQ(count_parameters(*GPT(options)), count(options));
  }
  EXPECT_EQ(count_parameters(*GPT(tiny())), 136'960);
}

TEST(GPT, TiedWeightIsOneParameterUnderTwoKeys) {
  const GPT model(smaller());
  EXPECT_EQ(model->named_parameters().find("lm_head.weight"), nullptr);
  const auto state = state_dict(*model);
  EXPECT_EQ(state.keys().back(), "lm_head.weight");  // last, as in Python
  EXPECT_TRUE(state["lm_head.weight"].is_alias_of(model->tok_embed->weight));
  EXPECT_EQ(state.size(), model->parameters().size() + 1);

  const GPT untied(smaller().weight_tying(false));
  EXPECT_NE(untied->named_parameters().find("lm_head.weight"), nullptr);
  EXPECT_EQ(state_dict(*untied).keys(), state.keys());
}

// The tie is used once by the optimiser, though the gradient comes from both ends.
TEST(GPT, TrainsTheTiedWeightOnce) {
  torch::manual_seed(1);
  GPT model(smaller());
  const auto ids = torch::randint(0, 20, {2, 6});
  const auto before = model->tok_embed->weight.detach().clone();
  auto h = model->forward_features(ids);
  const auto grads =
      torch::autograd::grad({model->logits(h.detach()).square().sum()}, {model->tok_embed->weight});
  model(ids).square().sum().backward();
  EXPECT_FALSE(torch::allclose(model->tok_embed->weight.grad(), grads[0]));  // the embedding's too
  torch::optim::AdamW optimizer(model->parameters(),
                                torch::optim::AdamWOptions(0.1).weight_decay(0));
  optimizer.step();
  // Adam's first step is lr in the gradient's direction, wherever the gradient is not tiny.
  const auto grad = model->tok_embed->weight.grad();
  const auto step = (model->tok_embed->weight.detach() - before).masked_select(grad.abs() > 1e-3);
  EXPECT_TRUE(all_close(step.abs(), torch::full_like(step, 0.1), {1e-4, 1e-4}));
}

TEST(GPT, StaysTiedThroughCloneConversionAndLoading) {
  torch::manual_seed(2);
  const auto ids = torch::randint(0, 20, {1, 5});
  GPT model(smaller());
  auto copy = std::dynamic_pointer_cast<GPTImpl>(model->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(copy->parameters().size(), model->parameters().size());
  EXPECT_TRUE(all_equal(copy->forward(ids), model(ids)));
  {
    const torch::NoGradGuard no_grad;
    copy->tok_embed->weight.add_(1.0);
  }
  EXPECT_TRUE(copy->head_weight().is_same(copy->tok_embed->weight));
  EXPECT_FALSE(torch::equal(copy->forward(ids), model(ids)));
  model->to(torch::kFloat64);
  EXPECT_EQ(model(ids).scalar_type(), torch::kFloat64);
  EXPECT_TRUE(model->head_weight().is_same(model->tok_embed->weight));

  GPT other(smaller());
  other->to(torch::kFloat64);
  load_state_dict(*other, state_dict(*model));
  EXPECT_TRUE(all_equal(other(ids), model(ids)));
}

TEST(GPT, LoadsEitherNameOfATieOrBothWhenTheyAgree) {
  torch::manual_seed(3);
  const GPT source(smaller());
  const auto full = state_dict(*source);
  const auto weight = source->tok_embed->weight.detach();
  for (const std::string left_out : {"", "lm_head.weight", "tok_embed.weight"}) {
    StateDict state;
    for (const auto& entry : full) {
      if (entry.key() != left_out) state.insert(entry.key(), entry.value().clone());
    }
    GPT target(smaller());
    EXPECT_TRUE(load_state_dict(*target, state).ok()) << left_out;
    EXPECT_TRUE(all_equal(target->tok_embed->weight.detach(), weight)) << left_out;
  }
  StateDict neither;
  for (const auto& entry : full) {
    if (!entry.value().is_alias_of(weight)) neither.insert(entry.key(), entry.value());
  }
  GPT target(smaller());
  EXPECT_TRUE(
      mentions(value_error([&] { load_state_dict(*target, neither); }), {"tok_embed.weight"}));
  StateDict differing;
  for (const auto& entry : full) {
    differing.insert(entry.key(),
                     entry.key() == "lm_head.weight" ? entry.value() + 1 : entry.value());
  }
  const auto untouched = target->tok_embed->weight.detach().clone();
  EXPECT_TRUE(mentions(value_error([&] { load_state_dict(*target, differing); }), {"tied"}));
  EXPECT_TRUE(all_equal(target->tok_embed->weight.detach(), untouched));
}

TEST(GPT, RejectsWhatDoesNotFit) {
  EXPECT_THROW(GPT(smaller().vocab_size(0)), c10::ValueError);
  EXPECT_THROW(GPT(smaller().context_length(0)), c10::ValueError);
  EXPECT_THROW(GPT(smaller().num_layers(0)), c10::ValueError);
  EXPECT_THROW(GPT(smaller().num_heads(5)), c10::ValueError);
  EXPECT_THROW(GPT(smaller().num_heads(0)), c10::ValueError);
  EXPECT_THROW(GPT(smaller().dropout(1.5)), c10::ValueError);
  GPT model(smaller());
  EXPECT_THROW(model(torch::zeros({1, 9}, torch::kLong)), c10::ValueError);  // context 8
  EXPECT_THROW(model(torch::full({1, 2}, 20)), c10::ValueError);
  EXPECT_THROW(model(torch::zeros({2}, torch::kLong)), c10::ValueError);
  EXPECT_THROW(model->logits(torch::zeros({1, 3})), c10::ValueError);
  EXPECT_THROW(model->last_logits(torch::zeros({1, 0}, torch::kLong), {}, nullptr),
               c10::ValueError);
}

// Positions count real tokens: a row padded on either side answers as the row alone.
TEST(GPT, PaddingOnEitherSideChangesNothing) {
  torch::manual_seed(4);
  GPT model(smaller());
  const auto ids = torch::randint(0, 20, {1, 5});
  const auto alone = model(ids);
  const auto padding = torch::full({1, 3}, 7, torch::kLong);
  const auto yes = torch::ones({1, 3}, torch::kBool), no = torch::zeros({1, 5}, torch::kBool);
  const auto left = model(torch::cat({padding, ids}, 1), torch::cat({yes, no}, 1));
  EXPECT_TRUE(all_close(left.narrow(1, 3, 5), alone));
  const auto right = model(torch::cat({ids, padding}, 1), torch::cat({no, yes}, 1));
  EXPECT_TRUE(all_close(right.narrow(1, 0, 5), alone));
}

// Wide enough that a step's linears take the kernel for few rows; a whole forward takes LibTorch's.
TEST(GPTSteps, OfWideModelsAreThoseOfAWholeForward) {
  const torch::NoGradGuard no_grad;
  for (const auto dtype : {torch::kFloat32, torch::kBFloat16, torch::kFloat64}) {
    for (const int64_t B : {1, 3, 5}) {
      torch::manual_seed(1);
      GPT model(
          GPTOptions().vocab_size(300).context_length(8).d_model(256).num_heads(4).num_layers(2));
      model->eval();
      model->to(dtype);
      const auto ids = torch::randint(0, 300, {B, 6});
      const auto whole = model(ids);
      auto cache = model->make_cache(B, 8);
      for (int64_t t = 0; t < 6; ++t) {
        const auto step = model(ids.narrow(1, t, 1), torch::Tensor(), &cache).squeeze(1);
        EXPECT_EQ(step.scalar_type(), dtype);
        const double tolerance = dtype == torch::kFloat64   ? 1e-10
                                 : dtype == torch::kFloat32 ? 1e-4
                                                            : 0.05;
        EXPECT_TRUE(all_close(step, whole.select(1, t), {tolerance, tolerance})) << B << ", " << t;
      }
    }
  }
}

}  // namespace
}  // namespace attn::testing
