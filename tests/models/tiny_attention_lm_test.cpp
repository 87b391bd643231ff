#include "attn/models/tiny_attention_lm.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/golden.h"
#include "support/golden_module.h"
#include "support/implementations.h"
#include "support/mentions.h"

#include <attn/state_dict.h>
#include <attn/summary.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <vector>

namespace attn::testing {
namespace {

constexpr int64_t kVocab = 64;

torch::Tensor cross_entropy(const torch::Tensor& logits, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

/// The repeat task: one random id a row, again and again.
torch::Tensor repeated_ids(int64_t rows, int64_t length, at::Generator& generator) {
  return torch::randint(0, kVocab, {rows, 1}, generator).repeat({1, length});
}

class TinyAttentionLMReference : public EachImplementation {
 protected:
  TinyAttentionLM make(const std::string& weights) {
    TinyAttentionLM model(TinyAttentionLMOptions(kVocab, 32, 4, 12).implementation(GetParam()));
    set_parameters(*model, golden.with_prefix(weights));
    return model;
  }
  Golden golden = load_golden("tiny_attention_lm");
};
ATTN_EACH_IMPLEMENTATION(TinyAttentionLMReference);

TEST_P(TinyAttentionLMReference, FirstStepIsPythons) {
  auto model = make("initial.");
  const auto logits = model(golden["ids"]);
  EXPECT_TRUE(all_close(logits, golden["logits"]));
  const auto loss = cross_entropy(logits, golden["targets"]);
  EXPECT_TRUE(all_close(loss, golden["losses"][0].to(torch::kFloat32)));
  loss.backward();
  expect_gradients_close(*model, golden.with_prefix("grad."));
}

TEST_P(TinyAttentionLMReference, TrainedModelAnswersAsPythons) {
  auto model = make("trained.");
  const auto& ids = golden["sample_ids"];
  const auto [logits, weights] = model->forward_with_weights(ids);
  EXPECT_TRUE(all_close(logits, golden["sample_logits"]));
  EXPECT_TRUE(all_close(weights, golden["sample_weights"]));
  EXPECT_TRUE(all_close(model(ids), golden["sample_logits"]));
  EXPECT_TRUE(all_equal(logits.argmax(-1), ids));  // it has learned to repeat
}

/// Hundreds of tiny steps: on a busy machine, two OpenMP threads that wait for one another take 20
/// times as long.
class OneThread {
 public:
  OneThread() { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = at::get_num_threads();
};

// Adam divides by the gradient's own size, so 360 steps carry rounding along: hence 1e-4, and only
// while there is a loss to speak of.
TEST_P(TinyAttentionLMReference, LearnsTheRepeatTaskWithPythonsLosses) {
  const OneThread one_thread;
  auto model = make("initial.");
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(5e-3));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(42);
  std::vector<double> losses;
  for (int step = 0; step < 360; ++step) {
    const auto batch = repeated_ids(16, 13, generator);
    const auto ids = batch.narrow(1, 0, 12);
    const auto targets = batch.narrow(1, 1, 12);
    if (step == 0) {
      ASSERT_TRUE(all_equal(ids, golden["ids"]));
      ASSERT_TRUE(all_equal(targets, golden["targets"]));
    }
    const auto loss = cross_entropy(model(ids), targets);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }

  const auto actual = torch::tensor(losses, torch::kFloat64);
  const auto& expected = golden["losses"];
  const auto large = expected > 0.01;
  EXPECT_GT(large.sum().item<int64_t>(), 120);
  EXPECT_TRUE(all_close(actual.masked_select(large), expected.masked_select(large), {1e-4, 0.0}));
  const double epochs[] = {2.8808, 0.0501, 0.0036};  // as the seed's program prints them
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    EXPECT_NEAR(actual.narrow(0, 120 * epoch, 120).mean().item<double>(), epochs[epoch], 5e-5);
  }
}

TEST(TinyAttentionLM, DrawsPythonsWeights) {
  if (!draws_as_the_goldens()) GTEST_SKIP() << kOtherDraws;
  torch::manual_seed(42);
  const MultiHeadSelfAttention shown_first(32, 4, 12);
  torch::randn({16, 12, 32});
  const TinyAttentionLM model(kVocab, 32, 4, 12);
  expect_parameters_equal(*model, load_golden("tiny_attention_lm").with_prefix("initial."));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(43);
  EXPECT_TRUE(
      all_equal(repeated_ids(1, 12, generator), load_golden("tiny_attention_lm")["sample_ids"]));
}

class TinyAttentionLMTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(7); }
};

TEST_F(TinyAttentionLMTest, WalksTheSecondSeedsShapes) {
  TinyAttentionLM model(/*vocab_size=*/64, /*d_model=*/32, /*n_heads=*/4,
                        /*max_context_length=*/12);
  const auto [logits, weights] = model->forward_with_weights(torch::randint(0, 64, {2, 12}));
  EXPECT_EQ(logits.sizes(), torch::IntArrayRef({2, 12, 64}));
  EXPECT_EQ(weights.sizes(), torch::IntArrayRef({2, 4, 12, 12}));
  EXPECT_EQ(count_parameters(*model), 64 * 32 + (4 * 32 * 32 + 4 * 32) + (32 * 64 + 64));
}

TEST_F(TinyAttentionLMTest, IsEmbeddingsAttentionAndHeadAndNothingElse) {
  for (const bool causal : {true, false}) {
    TinyAttentionLM model(TinyAttentionLMOptions(20, 8, 2, 6).causal(causal));
    const auto ids = torch::randint(0, 20, {3, 5});
    const auto x = model->token_emb(ids) + model->pos_emb(5);
    const auto [h, expected_weights] = model->attn->forward_with_weights(x);
    EXPECT_TRUE(all_close(model(ids), model->lm_head(h)));
    const auto [logits, weights] = model->forward_with_weights(ids);
    EXPECT_TRUE(all_close(logits, model->lm_head(h)));
    EXPECT_TRUE(all_equal(weights, expected_weights));
    EXPECT_EQ(weights.triu(1).count_nonzero().item<int64_t>() == 0, causal);
  }
}

TEST_F(TinyAttentionLMTest, HasPythonsKeysInPythonsOrder) {
  const TinyAttentionLM model(20, 8, 2, 6);
  EXPECT_EQ(state_dict(*model).keys(),
            Keys({"token_emb.embedding.weight", "attn.qkv_proj.weight", "attn.qkv_proj.bias",
                  "attn.out_proj.weight", "attn.out_proj.bias", "lm_head.weight", "lm_head.bias"}));
}

TEST_F(TinyAttentionLMTest, PositionsAreAddedAlongTheSequenceNotTheBatch) {
  TinyAttentionLM model(TinyAttentionLMOptions(20, 8, 2, 6).causal(false));
  const auto rows = model(torch::randint(0, 20, {1, 5}).repeat({3, 1}));
  EXPECT_TRUE(all_close(rows[1], rows[0]));
  EXPECT_TRUE(all_close(rows[2], rows[0]));
  // Without positions, the same token everywhere would give the same logits everywhere.
  const auto same = model(torch::full({1, 2}, 3, torch::kLong))[0];
  EXPECT_FALSE(all_close(same[0], same[1]));
}

TEST_F(TinyAttentionLMTest, AShorterModelsWeightsServeALongerOne) {
  TinyAttentionLM short_model(20, 8, 2, /*max_context_length=*/8);
  TinyAttentionLM long_model(20, 8, 2, /*max_context_length=*/16);
  load_state_dict(*long_model, state_dict(*short_model));
  const auto ids = torch::randint(0, 20, {1, 16});
  EXPECT_TRUE(all_close(long_model(ids).narrow(1, 0, 8), short_model(ids.narrow(1, 0, 8))));
  const auto weights = std::get<1>(long_model->forward_with_weights(ids));
  EXPECT_TRUE(all_equal(weights.triu(1), torch::zeros_like(weights)));
}

TEST_F(TinyAttentionLMTest, PositionsSurviveConversionsAndClones) {
  TinyAttentionLM model(20, 8, 2, 6);
  const auto ids = torch::randint(0, 20, {2, 6});
  const auto table = model->pos_emb->pe.clone();
  model->to(torch::kBFloat16);
  EXPECT_EQ(model(ids).scalar_type(), torch::kBFloat16);
  const auto copy = std::dynamic_pointer_cast<TinyAttentionLMImpl>(model->clone());
  EXPECT_TRUE(all_equal(copy->forward(ids), model(ids)));
  model->to(torch::kFloat32);
  EXPECT_TRUE(all_equal(model->pos_emb->pe, table));
  EXPECT_EQ(copy->pos_emb->pe.scalar_type(), torch::kBFloat16);
  EXPECT_EQ(copy->forward(ids).scalar_type(), torch::kBFloat16);
}

TEST_F(TinyAttentionLMTest, PaddedKeysAreNotSeen) {
  TinyAttentionLM model(TinyAttentionLMOptions(20, 8, 2, 6).causal(false));
  const auto ids = torch::randint(0, 20, {1, 6});
  const auto mask = torch::tensor({{false, false, false, false, true, true}});
  const auto logits = model(ids, mask);
  EXPECT_TRUE(all_close(logits.narrow(1, 0, 4), model(ids.narrow(1, 0, 4))));
  EXPECT_FALSE(all_close(logits, model(ids)));
  EXPECT_TRUE(all_close(std::get<0>(model->forward_with_weights(ids, mask)), logits));
}

TEST_F(TinyAttentionLMTest, TrainingAndEvalAgreeBitForBit) {
  TinyAttentionLM model(20, 8, 2, 6);
  const auto ids = torch::randint(0, 20, {2, 6});
  const auto training = model(ids);
  model->eval();
  EXPECT_TRUE(all_equal(model(ids), training));
}

TEST_F(TinyAttentionLMTest, AcceptsSingleTokensAndEmptyBatches) {
  TinyAttentionLM model(20, 8, 2, 6);
  EXPECT_EQ(model(torch::tensor({{3}})).sizes(), torch::IntArrayRef({1, 1, 20}));
  EXPECT_EQ(model(torch::zeros({0, 6}, torch::kLong)).sizes(), torch::IntArrayRef({0, 6, 20}));
}

TEST_F(TinyAttentionLMTest, RejectsIdsAndLengthsByNameAndStaysUsable) {
  TinyAttentionLM model(20, 8, 2, 6);
  const auto good = torch::randint(0, 20, {1, 6});
  const auto logits = model(good);
  const auto rejects = [&](const torch::Tensor& ids, std::initializer_list<std::string> parts) {
    EXPECT_TRUE(mentions(value_error([&] { model(ids); }), parts));
    EXPECT_TRUE(mentions(value_error([&] { model->forward_with_weights(ids); }), parts));
  };
  rejects(torch::tensor({{0, 20}}), {"ids", "vocab_size (20)", "got 20"});
  rejects(torch::tensor({{-1, 0}}), {"ids", "got -1"});
  rejects(torch::ones({1, 3}), {"ids", "int64", "Float"});
  rejects(torch::tensor({1, 2}), {"ids", "2-D", "[2]"});
  rejects(torch::zeros({1, 7}, torch::kLong), {"max_context_length (6)", "got 7"});
  EXPECT_TRUE(all_equal(model(good), logits));
}

TEST_F(TinyAttentionLMTest, RejectsSizesThatDoNotFit) {
  const auto message = [](int64_t vocab_size, int64_t d_model, int64_t n_heads,
                          int64_t max_context_length) {
    return value_error([&] { TinyAttentionLM(vocab_size, d_model, n_heads, max_context_length); });
  };
  EXPECT_TRUE(mentions(message(0, 8, 2, 6), {"vocab_size", "1", "got 0"}));
  EXPECT_TRUE(mentions(message(20, 0, 2, 6), {"d_model", "1", "got 0"}));
  EXPECT_TRUE(mentions(message(20, 8, 0, 6), {"n_heads", "1", "got 0"}));
  EXPECT_TRUE(mentions(message(20, 8, 2, 0), {"max_context_length", "1", "got 0"}));
  EXPECT_EQ(message(20, 7, 7, 6), "d_model must be even, got 7");
  EXPECT_EQ(message(20, 8, 3, 6), "d_model must be a multiple of n_heads (3), got 8");
}

}  // namespace
}  // namespace attn::testing
