#include "attn/kv_cache.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/implementations.h"
#include "support/mentions.h"
#include "support/modules.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/modules/container/sequential.h>

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace attn::testing {
namespace {

constexpr int64_t kContext = 8;

/// A module that attends, fed piece by piece.
struct Cached {
  const ModuleCase& subject;
  torch::nn::AnyModule module;
  KVCache cache;

  Cached(const ModuleCase& subject_, const torch::nn::AnyModule& module_, int64_t batch,
         torch::Dtype dtype)
      : subject(subject_),
        module(module_),
        cache(KVCacheOptions(layers(subject_), batch, ModuleCase::kHeads,
                             ModuleCase::kWidth / ModuleCase::kHeads, kContext)
                  .dtype(dtype)) {}

  static int64_t layers(const ModuleCase& subject) {
    return subject.name == "BlockStack" || subject.name == "GPT" ? 2 : 1;
  }

  torch::Tensor feed(const torch::Tensor& x, const torch::Tensor& mask = {}) {
    if (subject.input == Input::ids) return module.forward<torch::Tensor>(x, mask, &cache);
    const auto y = module.forward<torch::Tensor>(x, mask, &cache.layer(0));
    cache.advance(x.size(1));
    return y;
  }
  torch::Tensor feed_pieces(const torch::Tensor& x, const std::vector<int64_t>& sizes,
                            const torch::Tensor& mask = {}) {
    std::vector<torch::Tensor> outputs;
    for (const int64_t size : sizes) {
      const int64_t at = cache.length();
      outputs.push_back(
          feed(x.narrow(1, at, size), mask.defined() ? mask.narrow(1, 0, at + size) : mask));
    }
    return torch::cat(outputs, 1);
  }
};

using Parameter = std::tuple<ModuleCase, Implementation>;

class CachedModule : public ::testing::TestWithParam<Parameter> {
 protected:
  void SetUp() override { torch::manual_seed(5); }
  const ModuleCase& subject() const { return std::get<0>(GetParam()); }
  torch::nn::AnyModule make(torch::Dtype dtype) const {
    auto module = subject().make({.implementation = std::get<1>(GetParam()), .context = kContext});
    module.ptr()->to(dtype);
    module.ptr()->eval();
    return module;
  }
  const torch::NoGradGuard no_grad_;
};

std::string cached_name(const ::testing::TestParamInfo<Parameter>& info) {
  const char* names[] = {"_automatic", "_math", "_fused"};
  return std::get<0>(info.param).name + names[static_cast<int>(std::get<1>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(
    Each, CachedModule,
    ::testing::Combine(::testing::ValuesIn(modules_where([](const auto& m) { return m.attends; })),
                       ::testing::Values(Implementation::automatic, Implementation::math,
                                         Implementation::fused)),
    cached_name);

const std::vector<std::vector<int64_t>> kSplits = {
    {8}, {1, 1, 1, 1, 1, 1, 1, 1}, {3, 5}, {5, 3}, {7, 1}, {1, 7}, {2, 1, 4, 1}};

TEST_P(CachedModule, AnySplitEqualsOneForward) {
  for (const auto dtype : {torch::kFloat64, torch::kFloat32}) {
    if (std::get<1>(GetParam()) == Implementation::fused && dtype == torch::kFloat64) continue;
    const double bound = dtype == torch::kFloat64 ? 1e-10 : 1e-4;
    auto module = make(dtype);
    const auto x = subject().random_input(3, kContext, dtype);
    const auto whole = subject().run(module, x);
    for (const auto& split : kSplits) {
      Cached cached(subject(), module, 3, dtype);
      const auto pieces = cached.feed_pieces(x, split);
      EXPECT_LT((pieces - whole).abs().max().item<double>(), bound);
      EXPECT_TRUE(all_equal(pieces.argmax(-1), whole.argmax(-1)));
      EXPECT_EQ(cached.cache.length(), kContext);
    }
  }
}

TEST_P(CachedModule, AnySplitEqualsOneForwardWithPadding) {
  auto module = make(torch::kFloat32);
  const auto x = subject().random_input(2, kContext);
  auto mask = torch::zeros({2, kContext}, torch::kBool);
  mask.narrow(0, 1, 1).narrow(1, 0, 3).fill_(true);  // on the left
  const auto whole = subject().run(module, x, mask);
  for (const auto& split : kSplits) {
    Cached cached(subject(), module, 2, torch::kFloat32);
    EXPECT_TRUE(all_close(cached.feed_pieces(x, split, mask), whole, {1e-4, 1e-4}));
  }
}

TEST_P(CachedModule, ContinuesAfterTruncateAndReset) {
  auto module = make(torch::kFloat32);
  const auto x = subject().random_input(1, kContext), other = subject().random_input(1, kContext);
  const auto whole = subject().run(module, x);
  Cached cached(subject(), module, 1, torch::kFloat32);
  cached.feed_pieces(torch::cat({x.narrow(1, 0, 4), other.narrow(1, 4, 4)}, 1), {3, 5});
  cached.cache.truncate(4);
  EXPECT_TRUE(all_close(cached.feed(x.narrow(1, 4, 4)), whole.narrow(1, 4, 4), {1e-4, 1e-4}));
  cached.cache.reset();
  EXPECT_EQ(cached.cache.length(), 0);
  EXPECT_TRUE(all_close(cached.feed(x), whole, {1e-4, 1e-4}));
}

TEST_P(CachedModule, RefusesTokensBeyondTheContextAndStaysAsItWas) {
  auto module = make(torch::kFloat32);
  const auto x = subject().random_input(1, kContext);
  Cached cached(subject(), module, 1, torch::kFloat32);
  cached.feed(x.narrow(1, 0, 6));
  const auto message = value_error([&] { cached.feed(x.narrow(1, 0, 3)); });
  EXPECT_TRUE(mentions(message, {"8"})) << message;
  EXPECT_EQ(cached.cache.length(), 6);
  const auto whole = subject().run(module, x);
  EXPECT_TRUE(all_close(cached.feed(x.narrow(1, 6, 2)), whole.narrow(1, 6, 2), {1e-4, 1e-4}));
}

TEST_P(CachedModule, RefusesGradientsAndOtherBatches) {
  auto module = make(torch::kFloat32);
  {
    Cached cached(subject(), module, 2, torch::kFloat32);
    EXPECT_TRUE(
        mentions(value_error([&] { cached.feed(subject().random_input(1, 2)); }), {"2", "1"}));
    EXPECT_EQ(cached.cache.length(), 0);
  }
  const torch::AutoGradMode gradients(true);
  Cached cached(subject(), module, 1, torch::kFloat32);
  EXPECT_TRUE(
      mentions(value_error([&] { cached.feed(subject().random_input(1, 2)); }), {"gradients"}));
  EXPECT_EQ(cached.cache.length(), 0);
}

KVCacheOptions small() {
  return KVCacheOptions(2, 1, 3, 4, 8);
}

TEST(KVCache, TakesExactlyItsElements) {
  KVCache cache(KVCacheOptions(2, 3, 4, 5, 7));
  const auto x = torch::zeros({3, 4, 7, 5});
  int64_t elements = 0;
  for (int64_t i = 0; i < 2; ++i) {
    const auto [keys, values] = cache.layer(i).append(x, x);
    EXPECT_NE(keys.storage().data(), values.storage().data());
    for (const auto* t : {&keys, &values})
      elements += static_cast<int64_t>(t->storage().nbytes() / t->element_size());
  }
  EXPECT_EQ(elements, 2 * 2 * 3 * 4 * 7 * 5);
}

TEST(KVCache, AppendReturnsViewsOfAllThatIsThere) {
  KVCache cache(small());
  const auto k = torch::randn({1, 3, 5, 4}), v = torch::randn({1, 3, 5, 4});
  const auto first = cache.layer(0).append(k.narrow(2, 0, 3), v.narrow(2, 0, 3));
  EXPECT_EQ(cache.length(), 0);
  cache.advance(3);
  const auto [keys, values] = cache.layer(0).append(k.narrow(2, 3, 2), v.narrow(2, 3, 2));
  EXPECT_TRUE(all_equal(keys, k));
  EXPECT_TRUE(all_equal(values, v));
  EXPECT_EQ(keys.data_ptr(), first.first.data_ptr());  // no copy
}

TEST(KVCache, CloneIsIndependent) {
  KVCache cache(small());
  const auto x = torch::randn({1, 3, 2, 4});
  cache.layer(0).append(x, x), cache.layer(1).append(x, x);
  cache.advance(2);
  auto copy = cache.clone();
  EXPECT_EQ(copy.length(), 2);
  const auto zero = torch::zeros({1, 3, 1, 4});
  copy.truncate(0);
  copy.layer(0).append(zero, zero);
  EXPECT_EQ(cache.length(), 2);
  EXPECT_TRUE(all_equal(cache.layer(0).append(zero, zero).first.narrow(2, 0, 2), x));
}

TEST(KVCache, MovesWithItsLayers) {
  KVCache cache(small());
  const auto x = torch::randn({1, 3, 2, 4});
  cache.layer(1).append(x, x);
  cache.advance(2);
  KVCache moved = std::move(cache);
  EXPECT_EQ(moved.layer(1).length(), 2);
  moved.truncate(1);
  EXPECT_EQ(moved.layer(1).length(), 1);
}

TEST(KVCache, RejectsWhatDoesNotFit) {
  EXPECT_THROW(KVCache(KVCacheOptions(0, 1, 1, 1, 1)), c10::ValueError);
  EXPECT_THROW(KVCache(KVCacheOptions(1, -1, 1, 1, 1)), c10::ValueError);
  EXPECT_THROW(KVCache(KVCacheOptions(1, 1, 1, 1, 0)), c10::ValueError);
  EXPECT_THROW(KVCache(small().dtype(torch::kLong)), c10::ValueError);
  KVCache cache(small());
  EXPECT_THROW(cache.layer(2), c10::ValueError);
  EXPECT_THROW(cache.layer(-1), c10::ValueError);
  EXPECT_THROW(cache.truncate(1), c10::ValueError);
  EXPECT_THROW(cache.advance(9), c10::ValueError);
  EXPECT_THROW(cache.advance(-1), c10::ValueError);
  const auto append = [&](const torch::Tensor& k, const torch::Tensor& v) {
    return value_error([&] { cache.layer(0).append(k, v); });
  };
  const auto ok = torch::zeros({1, 3, 2, 4});
  EXPECT_TRUE(mentions(append(torch::zeros({1, 3, 2, 5}), ok), {"D = 4", "[1, 3, 2, 5]"}));
  EXPECT_TRUE(mentions(append(ok, ok.to(torch::kDouble)), {"Float", "Double"}));
  EXPECT_TRUE(mentions(append(ok, torch::zeros({1, 3, 1, 4})), {"2", "1"}));
  const auto nine = torch::zeros({1, 3, 9, 4});
  EXPECT_TRUE(mentions(append(nine, nine), {"capacity (8)", "9 after 0"}));
}

TEST(KVCache, IsWritableInsideAndOutsideOfInferenceMode) {
  std::optional<KVCache> cache;
  {
    const c10::InferenceMode inference;
    cache.emplace(small());
    const auto x = torch::ones({1, 3, 2, 4});
    cache->layer(0).append(x, x);
    cache->advance(2);
  }
  const auto x = torch::zeros({1, 3, 2, 4});
  EXPECT_EQ(cache->layer(0).append(x, x).first.sum().item<float>(), 24.0F);
}

TEST(KVCache, OfACausalModelOnly) {
  const torch::NoGradGuard no_grad;
  SelfAttention bidirectional(SelfAttentionOptions(12, 3).causal(false));
  KVCache cache(small());
  EXPECT_TRUE(mentions(value_error([&] {
                         bidirectional(torch::randn({1, 2, 12}), torch::Tensor(), &cache.layer(0));
                       }),
                       {"causal"}));
}

TEST(KVCache, ModelsRefuseACacheOfOtherLayers) {
  const torch::NoGradGuard no_grad;
  auto module = all_modules()[7].make({});
  ASSERT_EQ(all_modules()[7].name, "GPT");
  KVCache three(KVCacheOptions(3, 1, 3, 4, 8));
  EXPECT_TRUE(mentions(
      value_error([&] {
        module.forward<torch::Tensor>(torch::zeros({1, 2}, torch::kLong), torch::Tensor(), &three);
      }),
      {"layers (2)", "got 3"}));
  EXPECT_EQ(three.length(), 0);
}

// The first block has appended by then.
TEST(KVCache, AThrowBetweenTheLayersLeavesItUsable) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(6);
  GPT model(GPTOptions().vocab_size(20).context_length(8).d_model(12).num_heads(3).num_layers(2));
  model->eval();
  const auto ids = torch::randint(0, 20, {1, 8});
  const auto whole = model(ids);
  auto cache = model->make_cache(1, 8);
  model(ids.narrow(1, 0, 5), torch::Tensor(), &cache);

  auto* last = model->blocks->children()[1]->as<TransformerBlockImpl>();
  last->mlp->to(torch::kFloat64);
  EXPECT_ANY_THROW(model((ids.narrow(1, 5, 3) + 1).remainder(20), torch::Tensor(), &cache));
  EXPECT_EQ(cache.length(), 5);
  last->mlp->to(torch::kFloat32);
  EXPECT_TRUE(all_close(model(ids.narrow(1, 5, 3), torch::Tensor(), &cache), whole.narrow(1, 5, 3),
                        {1e-4, 1e-4}));
}

TEST(KVCache, ModulesStayUsableInSequential) {
  torch::nn::Sequential layers(SelfAttention(12, 3), LayerNorm(12),
                               TransformerBlock(block_options({})));
  EXPECT_EQ(layers->forward(torch::randn({1, 4, 12})).sizes(), (std::vector<int64_t>{1, 4, 12}));
}

}  // namespace
}  // namespace attn::testing
