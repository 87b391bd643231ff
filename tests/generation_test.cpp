#include "attn/generation.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/mentions.h"

#include <attn/models/gpt.h>
#include <attn/models/tiny_attention_lm.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <thread>

namespace attn::testing {
namespace {

constexpr int64_t kVocab = 20, kContext = 8;

GPT make_gpt(double dropout = 0.0) {
  torch::manual_seed(11);
  GPT model(GPTOptions()
                .vocab_size(kVocab)
                .context_length(kContext)
                .d_model(12)
                .num_heads(3)
                .num_layers(2)
                .dropout(dropout));
  const torch::NoGradGuard no_grad;
  model->tok_embed->weight.mul_(30.0);  // opinions: the initial logits are all alike
  return model;
}

TinyAttentionLM make_tiny() {
  torch::manual_seed(12);
  TinyAttentionLM model(kVocab, 12, 3, kContext);
  const torch::NoGradGuard no_grad;
  model->token_emb->embedding->weight.mul_(50.0);
  model->lm_head->weight.mul_(5.0);
  return model;
}

torch::Tensor prompt_of(int64_t length, int64_t rows = 1) {
  torch::manual_seed(13);
  return torch::randint(0, kVocab, {rows, length});
}

/// Always the same logits; counts what it is asked.
class Fixed : public CausalLM {
 public:
  explicit Fixed(const torch::Tensor& logits) : logits_(logits) {}
  torch::Tensor last_logits(const torch::Tensor& ids, const torch::Tensor&, KVCache*) override {
    ++calls;
    tokens += ids.size(1);
    return logits_.expand({ids.size(0), -1});
  }
  KVCache make_cache(int64_t batch, int64_t capacity) const override {
    return KVCache(KVCacheOptions(1, batch, 1, 1, capacity));
  }
  int64_t vocab_size() const override { return logits_.size(0); }
  int64_t context_length() const override { return 1000; }

  int64_t calls = 0, tokens = 0;

 private:
  torch::Tensor logits_;
};

/// Which ids are drawn, in 400 draws.
std::set<int64_t> drawn(const torch::Tensor& logits, GenerateOptions options) {
  Fixed model(logits);
  options.max_new_tokens = 400;
  options.seed = 1;
  const auto ids = generate(model, torch::zeros({1, 1}, torch::kLong), options).narrow(1, 1, 400);
  std::set<int64_t> found;
  for (int64_t i = 0; i < 400; ++i) found.insert(ids[0][i].item<int64_t>());
  return found;
}

TEST(Generate, CachedEqualsUncachedAcrossTheContext) {
  for (const int64_t T : {1, 2, 7, 8, 9, 12}) {
    for (const double temperature : {0.0, 1.0}) {
      SCOPED_TRACE(::testing::Message() << "prompt " << T << ", temperature " << temperature);
      GenerateOptions options{.max_new_tokens = 10, .temperature = temperature, .seed = 5};
      auto uncached = options;
      uncached.use_cache = false;
      auto gpt = make_gpt();
      EXPECT_TRUE(all_equal(generate(gpt, prompt_of(T, 3), options),
                            generate(gpt, prompt_of(T, 3), uncached)));
      auto tiny = make_tiny();
      EXPECT_TRUE(all_equal(generate(tiny, prompt_of(T, 3), options),
                            generate(tiny, prompt_of(T, 3), uncached)));
    }
  }
}

TEST(Generate, GreedyIsTheArgMaxOfAFullForward) {
  auto model = make_gpt();
  const auto ids = generate(model, prompt_of(3, 2), {.max_new_tokens = 5, .temperature = 0.0});
  ASSERT_EQ(ids.sizes(), (std::vector<int64_t>{2, 8}));
  EXPECT_TRUE(all_equal(ids.narrow(1, 0, 3), prompt_of(3, 2)));
  const auto best = model(ids).argmax(-1);  // [2, 8]
  EXPECT_TRUE(all_equal(ids.narrow(1, 3, 5), best.narrow(1, 2, 5)));
}

TEST(Generate, GreedyDrawsNothing) {
  auto model = make_gpt();
  torch::manual_seed(1);
  const auto expected = torch::rand(1);
  torch::manual_seed(1);
  generate(model, prompt_of(3), {.max_new_tokens = 3, .temperature = 0.0});
  torch::manual_seed(1);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(9);
  const auto state = generator.get_state();
  generate(model, torch::zeros({1, 1}, torch::kLong),
           {.max_new_tokens = 3, .temperature = 0.0, .generator = generator});
  EXPECT_TRUE(all_equal(generator.get_state(), state));
  EXPECT_TRUE(all_equal(torch::rand(1), expected));
}

TEST(Generate, SeedLeavesTheDefaultGeneratorAloneAndRepeats) {
  auto model = make_gpt();
  const auto prompt = prompt_of(3, 2);
  torch::manual_seed(1);
  const auto expected = torch::rand(1);
  torch::manual_seed(1);
  const auto first = generate(model, prompt, {.max_new_tokens = 5, .seed = 3});
  EXPECT_TRUE(all_equal(torch::rand(1), expected));
  EXPECT_TRUE(all_equal(generate(model, prompt, {.max_new_tokens = 5, .seed = 3}), first));
  EXPECT_FALSE(torch::equal(generate(model, prompt, {.max_new_tokens = 5, .seed = 4}), first));

  torch::manual_seed(3);  // neither: the default generator, as Python
  EXPECT_TRUE(all_equal(generate(model, prompt, {.max_new_tokens = 5}), first));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  EXPECT_TRUE(
      all_equal(generate(model, prompt, {.max_new_tokens = 5, .generator = generator}), first));
}

TEST(Generate, TopKKeepsTiesAndTakesAnyNumber) {
  const auto logits = torch::tensor({1.0, 3.0, 2.0, 2.0, 0.0});
  EXPECT_EQ(drawn(logits, {}), (std::set<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(drawn(logits, {.top_k = 1}), (std::set<int64_t>{1}));
  EXPECT_EQ(drawn(logits, {.top_k = 2}), (std::set<int64_t>{1, 2, 3}));  // a tie
  EXPECT_EQ(drawn(logits, {.top_k = 3}), (std::set<int64_t>{1, 2, 3}));
  for (const int64_t all : {0, -1, 5, 100})
    EXPECT_EQ(drawn(logits, {.top_k = all}).size(), 5) << all;
}

TEST(Generate, TopPKeepsTheFewestThatReachIt) {
  const auto logits = torch::tensor({0.5, 0.3, 0.15, 0.05}).log();
  EXPECT_EQ(drawn(logits, {.top_p = 1e-9}), (std::set<int64_t>{0}));
  EXPECT_EQ(drawn(logits, {.top_p = 0.45}), (std::set<int64_t>{0}));
  EXPECT_EQ(drawn(logits, {.top_p = 0.6}), (std::set<int64_t>{0, 1}));
  EXPECT_EQ(drawn(logits, {.top_p = 0.9}), (std::set<int64_t>{0, 1, 2}));
  EXPECT_EQ(drawn(logits, {.top_p = 1.0}), (std::set<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(drawn(logits, {.top_k = 2, .top_p = 0.99}), (std::set<int64_t>{0, 1}));
}

TEST(Generate, TinyTemperatureIsGreedyAndUnusedIdsAreNeverDrawn) {
  const auto logits = torch::tensor({1.0, 3.0, 2.0, 5.0});
  EXPECT_EQ(drawn(logits, {.temperature = 1e-8}), (std::set<int64_t>{3}));
  EXPECT_EQ(drawn(logits * 1e30, {.temperature = 1e-30}), (std::set<int64_t>{3}));
  EXPECT_EQ(drawn(logits, {.temperature = 1e6}).size(), 4);
  EXPECT_EQ(drawn(logits, {.used_vocab = 3}), (std::set<int64_t>{0, 1, 2}));
  EXPECT_EQ(drawn(logits, {.temperature = 0.0, .used_vocab = 3}), (std::set<int64_t>{1}));
}

TEST(Generate, StopTokensPadAndEndTheCall) {
  auto model = make_gpt();
  const auto prompt = prompt_of(2, 3);
  const auto free = generate(model, prompt, {.max_new_tokens = 6, .seed = 2});
  const auto stop = free[0][3].item<int64_t>();  // the first row's second draw
  const auto ids = generate(model, prompt, {.max_new_tokens = 6, .seed = 2, .stop_tokens = {stop}});
  bool all_done = true;
  int64_t longest = 0;
  for (int64_t row = 0; row < 3; ++row) {
    bool done = false;
    for (int64_t t = 2; t < ids.size(1); ++t) {
      const auto id = ids[row][t].item<int64_t>();
      EXPECT_TRUE(!done || id == stop);
      if (!done) longest = std::max(longest, t);
      done = done || id == stop;
    }
    all_done = all_done && done;
  }
  EXPECT_TRUE(ids.size(1) == 8 || (all_done && ids.size(1) == longest + 1));
  const auto alone =
      generate(model, prompt.narrow(0, 0, 1),
               {.max_new_tokens = 6,
                .temperature = 0.0,
                .stop_tokens = {generate(model, prompt.narrow(0, 0, 1),
                                         {.max_new_tokens = 1, .temperature = 0.0})[0][2]
                                    .item<int64_t>()}});
  EXPECT_EQ(alone.size(1), 3);  // drew it at once: done
}

TEST(Generate, OnTokenSeesEachStepAndMayEndTheCall) {
  auto model = make_gpt();
  const auto prompt = prompt_of(2, 2);
  std::vector<torch::Tensor> seen;
  const auto ids = generate(
      model, prompt, {.max_new_tokens = 6, .seed = 2, .on_token = [&](const torch::Tensor& next) {
                        seen.push_back(next.clone());
                        return seen.size() < 3;
                      }});
  ASSERT_EQ(ids.size(1), 5);
  EXPECT_TRUE(all_equal(torch::stack(seen, 1), ids.narrow(1, 2, 3)));
}

TEST(Generate, ComputesEachTokenOnceWithACache) {
  Fixed model(torch::zeros({4}));
  generate(model, torch::zeros({1, 5}, torch::kLong), {.max_new_tokens = 3});
  EXPECT_EQ(model.calls, 3);
  EXPECT_EQ(model.tokens, 5 + 5 + 5 + 1 + 2);  // it keeps no cache, so it is shown all again
  auto gpt = make_gpt();
  KVCache cache = gpt->make_cache(1, 8);
  const torch::NoGradGuard no_grad;
  gpt->last_logits(prompt_of(5), {}, &cache);
  EXPECT_EQ(cache.length(), 5);
}

TEST(Generate, RestoresTheModeHoweverItEnds) {
  auto model = make_gpt(0.5);
  model->train();
  model->blocks->children()[0]->eval();  // frozen by its owner
  const auto modes = [&] {
    std::vector<bool> found;
    for (const auto& module : model->modules()) found.push_back(module->is_training());
    return found;
  };
  const auto before = modes();
  const auto first = generate(model, prompt_of(3), {.max_new_tokens = 4, .temperature = 0.0});
  EXPECT_TRUE(all_equal(generate(model, prompt_of(3), {.max_new_tokens = 4, .temperature = 0.0}),
                        first));  // no dropout
  EXPECT_EQ(modes(), before);
  EXPECT_THROW(generate(model, prompt_of(3),
                        {.max_new_tokens = 4,
                         .on_token = [](const torch::Tensor&) -> bool {
                           throw std::runtime_error("stop");
                         }}),
               std::runtime_error);
  EXPECT_EQ(modes(), before);
}

TEST(Generate, KeepsNoGradientsAndReturnsTheIdsAlone) {
  auto model = make_gpt();
  const auto prompt = prompt_of(3);
  const auto ids = generate(model, prompt.to(torch::kInt32), {.max_new_tokens = 2, .seed = 1});
  EXPECT_EQ(ids.scalar_type(), torch::kInt64);
  EXPECT_FALSE(ids.requires_grad());
  EXPECT_FALSE(model->tok_embed->weight.grad().defined());
  EXPECT_TRUE(torch::GradMode::is_enabled());
  EXPECT_TRUE(all_equal(generate(model, prompt, {.max_new_tokens = 0}), prompt));
  EXPECT_EQ(generate(model, torch::zeros({0, 3}, torch::kLong), {.max_new_tokens = 2}).sizes(),
            (std::vector<int64_t>{0, 5}));
}

TEST(Generate, LeftPaddedRowsContinueAsAlone) {
  auto model = make_gpt();
  const auto a = prompt_of(5), b = prompt_of(2);
  const auto padded = torch::cat({a, torch::cat({torch::zeros({1, 3}, torch::kLong), b}, 1)}, 0);
  auto mask = torch::zeros({2, 5}, torch::kBool);
  mask.narrow(0, 1, 1).narrow(1, 0, 3).fill_(true);
  for (const bool use_cache : {true, false}) {
    const auto ids = generate(model, padded,
                              {.max_new_tokens = 3,
                               .temperature = 0.0,
                               .use_cache = use_cache,
                               .key_padding_mask = mask});
    const auto greedy = [&](const torch::Tensor& prompt) {
      return generate(model, prompt, {.max_new_tokens = 3, .temperature = 0.0});
    };
    EXPECT_TRUE(all_equal(ids.narrow(0, 0, 1), greedy(a)));
    EXPECT_TRUE(all_equal(ids.narrow(0, 1, 1).narrow(1, 3, 5), greedy(b)));
  }
}

TEST(Generate, ThreadsDoNotDisturbEachOther) {
  auto model = make_gpt();
  model->eval();
  std::vector<torch::Tensor> alone(4), together(4);
  const auto run = [&](size_t i) {
    return generate(model, prompt_of(2), {.max_new_tokens = 20, .seed = 100 + i});
  };
  for (size_t i = 0; i < 4; ++i) alone[i] = run(i);
  const auto prompt = prompt_of(2);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) {
    threads.emplace_back(
        [&, i] { together[i] = generate(model, prompt, {.max_new_tokens = 20, .seed = 100 + i}); });
  }
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(all_equal(together[i], alone[i])) << i;
}

TEST(Generate, RejectsWhatIsOutOfRange) {
  auto model = make_gpt();
  const auto prompt = prompt_of(3);
  const auto error = [&](GenerateOptions options) {
    options.max_new_tokens = options.max_new_tokens == 1 ? 2 : options.max_new_tokens;
    return value_error([&] { generate(model, prompt, options); });
  };
  EXPECT_TRUE(mentions(error({.max_new_tokens = -1}), {"max_new_tokens", "-1"}));
  EXPECT_TRUE(mentions(error({.temperature = -0.5}), {"temperature", "-0.5"}));
  EXPECT_TRUE(mentions(error({.temperature = std::nan("")}), {"temperature", "nan"}));
  EXPECT_TRUE(mentions(error({.temperature = INFINITY}), {"temperature", "inf"}));
  EXPECT_TRUE(mentions(error({.top_p = 0.0}), {"top_p"}));
  EXPECT_TRUE(mentions(error({.top_p = 1.1}), {"top_p", "1.1"}));
  EXPECT_TRUE(mentions(error({.top_p = std::nan("")}), {"top_p"}));
  EXPECT_TRUE(mentions(error({.stop_tokens = {20}}), {"stop tokens", "20"}));
  EXPECT_TRUE(mentions(error({.used_vocab = 21}), {"used_vocab", "21"}));
  EXPECT_TRUE(mentions(error({.seed = 1, .generator = at::make_generator<at::CPUGeneratorImpl>(1)}),
                       {"seed", "generator"}));
  auto right = torch::zeros({1, 3}, torch::kBool);
  right[0][2] = true;
  EXPECT_TRUE(mentions(error({.key_padding_mask = right}), {"left"}));
  EXPECT_TRUE(
      mentions(error({.key_padding_mask = torch::zeros({1, 2}, torch::kBool)}), {"[1, 3]"}));
  EXPECT_TRUE(mentions(value_error([&] {
                         generate(model, torch::zeros({1, 0}, torch::kLong), {});
                       }),
                       {"at least 1"}));
  EXPECT_TRUE(mentions(value_error([&] { generate(model, torch::full({1, 1}, 20), {}); }), {"20"}));
  EXPECT_TRUE(mentions(value_error([&] { generate(model, torch::zeros({1, 2}), {}); }), {"int64"}));
  Fixed broken(torch::full({4}, std::numeric_limits<float>::quiet_NaN()));
  for (const double temperature : {0.0, 1.0}) {
    EXPECT_TRUE(mentions(
        value_error([&] {
          generate(broken, torch::zeros({1, 1}, torch::kLong), {.temperature = temperature});
        }),
        {"NaN"}));
  }
}

}  // namespace
}  // namespace attn::testing
