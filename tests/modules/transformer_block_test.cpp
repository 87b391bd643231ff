#include "attn/modules/transformer_block.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/golden.h"
#include "support/golden_module.h"
#include "support/implementations.h"
#include "support/mentions.h"

#include <attn/state_dict.h>
#include <attn/summary.h>

#include <torch/nn/modules/container/sequential.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <functional>
#include <tuple>

namespace attn::testing {
namespace {

BlockOptions small() {
  return BlockOptions()
      .d_model(12)
      .num_heads(3)
      .context_length(8)
      .attn_dropout(0.0)
      .residual_dropout(0.0);
}

class TransformerBlockTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(7); }

  /// The same draws for all options; scales and shifts of the norms that show.
  TransformerBlock make(const BlockOptions& options) {
    torch::manual_seed(8);
    TransformerBlock block(options);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : block->named_parameters()) {
      if (parameter.key().starts_with("ln")) parameter.value().add_(torch::randn({12}), 0.3);
    }
    return block;
  }
  torch::Tensor x = torch::randn({2, 5, 12});
};

TEST_F(TransformerBlockTest, PreLnNormalisesBeforeEachHalf) {
  auto block = make(small().pre_ln(true));
  const auto h = x + block->attn(block->ln1(x));
  EXPECT_TRUE(all_close(block(x), h + block->mlp(block->ln2(h))));
}

TEST_F(TransformerBlockTest, PostLnNormalisesEachSum) {
  auto block = make(small().pre_ln(false));
  const auto h = block->ln1(x + block->attn(x));
  EXPECT_TRUE(all_close(block(x), block->ln2(h + block->mlp(h))));
}

TEST_F(TransformerBlockTest, EveryOptionChangesTheOutput) {
  const auto y = make(small())(x);
  const std::pair<const char*, BlockOptions> others[] = {
      {"pre_ln", small().pre_ln(false)},
      {"layer_norm_eps", small().layer_norm_eps(0.1)},
      {"activation gelu", small().activation(Activation::gelu)},
      {"activation relu", small().activation(Activation::relu)},
      {"use_bias", small().use_bias(false)},
      {"num_heads", small().num_heads(4)},
      {"mlp_expansion", small().mlp_expansion(2)},
      {"causal", small().causal(false)},
      {"attn_dropout", small().attn_dropout(0.5)},
      {"residual_dropout", small().residual_dropout(0.5)},
  };
  for (const auto& [name, options] : others) {
    EXPECT_FALSE(all_close(make(options)(x), y)) << name;
  }
}

TEST_F(TransformerBlockTest, EpsReachesBothNorms) {
  const auto block = make(small().layer_norm_eps(0.1));
  EXPECT_EQ(block->ln1->options.eps(), 0.1);
  EXPECT_EQ(block->ln2->options.eps(), 0.1);
}

TEST_F(TransformerBlockTest, EvalSwitchesEveryDropoutOff) {
  const auto dropped = small().attn_dropout(0.9).residual_dropout(0.9);
  for (const auto implementation : kImplementations) {
    SCOPED_TRACE(name_of(implementation));
    auto block = make(BlockOptions(dropped).implementation(implementation));
    const auto training = block(x);
    block->eval();
    const auto y = block(x);
    EXPECT_TRUE(all_equal(block(x), y));
    EXPECT_TRUE(all_equal(make(small().implementation(implementation))(x), y));
    EXPECT_FALSE(all_close(training, y));
  }
}

TEST_F(TransformerBlockTest, DroppingTheResidualsLeavesTheInput) {
  EXPECT_TRUE(all_equal(make(small().residual_dropout(1.0))(x), x));
}

TEST_F(TransformerBlockTest, TheMaskReachesTheAttention) {
  auto block = make(small().causal(false));
  auto mask = torch::zeros({2, 5}, torch::kBool);
  mask.narrow(1, 3, 2).fill_(true);
  EXPECT_TRUE(all_close(block(x, mask).narrow(1, 0, 3), block(x.narrow(1, 0, 3))));
  EXPECT_FALSE(all_close(block(x, mask), block(x)));
}

TEST_F(TransformerBlockTest, RunsInsideSequential) {
  auto block = make(small());
  torch::nn::Sequential stack(block, block);
  EXPECT_TRUE(all_equal(stack->forward(x), block(block(x))));
}

TEST_F(TransformerBlockTest, HasPythonsKeysInPythonsOrder) {
  EXPECT_EQ(state_dict(*make(small())).keys(),
            Keys({"ln1.scale", "ln1.shift", "attn.qkv.weight", "attn.qkv.bias",
                  "attn.out_proj.weight", "attn.out_proj.bias", "ln2.scale", "ln2.shift",
                  "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias"}));
  EXPECT_EQ(state_dict(*make(small().use_bias(false))).keys(),
            Keys({"ln1.scale", "ln1.shift", "attn.qkv.weight", "attn.out_proj.weight", "ln2.scale",
                  "ln2.shift", "mlp.fc1.weight", "mlp.fc2.weight"}));
}

TEST_F(TransformerBlockTest, RejectsWhatItsPartsReject) {
  const auto message = [](const BlockOptions& options) {
    return value_error([&] { TransformerBlock block(options); });
  };
  EXPECT_TRUE(mentions(message(small().num_heads(5)), {"d_model", "num_heads (5)", "got 12"}));
  EXPECT_TRUE(mentions(message(small().d_model(0)), {"d_model", "1", "got 0"}));
  EXPECT_TRUE(mentions(message(small().layer_norm_eps(-1.0)), {"eps", "got -1"}));
  EXPECT_TRUE(mentions(message(small().mlp_expansion(0)), {"mlp_expansion", "got 0"}));
  auto block = make(small());
  EXPECT_TRUE(mentions(value_error([&] {
                         block(torch::randn({1, 9, 12}));
                       }),
                       {"context_length (8)", "got 9"}));
  EXPECT_TRUE(mentions(value_error([&] {
                         block(torch::randn({1, 5, 11}));
                       }),
                       {"d_model (12)", "11"}));
}

struct StackReference {
  Golden golden;
  BlockStackOptions options;
};

StackReference stack_reference(bool pre_ln, Implementation implementation) {
  return {load_golden(pre_ln ? "block_stack_pre_ln" : "block_stack_post_ln"),
          {BlockOptions()
               .d_model(24)
               .num_heads(3)
               .context_length(16)
               .attn_dropout(0.0)
               .residual_dropout(0.0)
               .pre_ln(pre_ln)
               .implementation(implementation),
           /*depth=*/2}};
}

class BlockStackReference : public ::testing::TestWithParam<std::tuple<bool, Implementation>> {
 public:
  static std::string name(const ::testing::TestParamInfo<ParamType>& info) {
    const auto [pre_ln, implementation] = info.param;
    return std::string(pre_ln ? "pre_ln_" : "post_ln_") + name_of(implementation);
  }
};
INSTANTIATE_TEST_SUITE_P(Each, BlockStackReference,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::ValuesIn(kImplementations)),
                         BlockStackReference::name);

TEST_P(BlockStackReference, OutputsAndGradientsArePythons) {
  const auto [pre_ln, implementation] = GetParam();
  const auto [golden, options] = stack_reference(pre_ln, implementation);
  BlockStack stack(options);
  set_parameters(*stack, golden.with_prefix("weight."));
  const auto y = stack(golden["tokens"]);
  EXPECT_TRUE(all_close(y, golden["y"]));
  y.backward(golden["grad_output"]);
  expect_gradients_close(*stack, golden.with_prefix("grad."));
}

TEST(BlockStack, DrawsPythonsWeightsAndTokens) {
  if (!draws_as_the_goldens()) GTEST_SKIP() << kOtherDraws;
  for (const bool pre_ln : {true, false}) {
    const auto [golden, options] = stack_reference(pre_ln, Implementation::automatic);
    torch::manual_seed(0);
    const BlockStack stack(options);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : stack->named_parameters()) {
        const auto& name = parameter.key();
        if (name.ends_with(".scale") || name.ends_with(".shift")) {
          parameter.value().add_(0.1 * torch::randn(parameter.value().sizes()));
        }
      }
    }
    expect_parameters_equal(*stack, golden.with_prefix("weight."));
    EXPECT_TRUE(all_equal(torch::randint(0, 128, {2, 11}), golden["tokens"]));
    EXPECT_TRUE(all_equal(torch::randn({2, 11, 24}), golden["grad_output"]));
  }
}

class BlockStackTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(7); }
};

TEST_F(BlockStackTest, EmbedsRunsTheBlocksAndAlwaysNormalises) {
  for (const bool pre_ln : {true, false}) {
    BlockStack stack(small().pre_ln(pre_ln).layer_norm_eps(0.1), /*depth=*/2);
    const auto tokens = torch::randint(0, 128, {2, 8});
    auto h = stack->embed(tokens);
    for (const auto& block : *stack->blocks) h = block->as<TransformerBlock>()->forward(h);
    EXPECT_TRUE(all_close(stack(tokens), stack->final_ln(h)));
    EXPECT_EQ(stack->final_ln->options.eps(), 0.1);
  }
}

// A post-LN block ends with a LayerNorm: behind it, another one would normalise twice.
TEST_F(BlockStackTest, LeavesTheFinalLayerNormOutByOption) {
  for (const bool pre_ln : {true, false}) {
    auto block = small().pre_ln(pre_ln);
    BlockStack stack(BlockStackOptions(block, 2).final_ln(false));
    EXPECT_TRUE(stack->final_ln.is_empty());
    EXPECT_EQ(state_dict(*stack).keys().back(), "blocks.1.mlp.fc2.bias");
    BlockStack normalising(BlockStackOptions(block, 2));
    load_state_dict(*normalising, state_dict(*stack), {.strict = false});
    {
      const torch::NoGradGuard no_grad;
      normalising->final_ln->scale.mul_(2);
    }
    const auto tokens = torch::randint(0, 128, {2, 8});
    const auto h = stack(tokens);
    EXPECT_TRUE(all_close(normalising(tokens), normalising->final_ln(h)));
    EXPECT_FALSE(all_close(normalising(tokens), h));

    const auto copy = std::dynamic_pointer_cast<BlockStackImpl>(stack->clone());
    EXPECT_TRUE(all_equal(copy->forward(tokens), h));
    EXPECT_TRUE(copy->final_ln.is_empty());
  }
}

TEST_F(BlockStackTest, WalksTheSecondSeedsShapes) {
  const auto options = BlockOptions().d_model(128).num_heads(8).context_length(32).pre_ln(true);
  BlockStack stack(options, /*depth=*/3);
  const auto output = stack(torch::randint(0, 128, {2, 32}));
  EXPECT_EQ(output.sizes(), torch::IntArrayRef({2, 32, 128}));
}

TEST_F(BlockStackTest, HasPythonsKeysInPythonsOrder) {
  const BlockStack stack(small().use_bias(false), /*depth=*/2);
  EXPECT_EQ(
      state_dict(*stack).keys(),
      Keys({"embed.weight", "blocks.0.ln1.scale", "blocks.0.ln1.shift", "blocks.0.attn.qkv.weight",
            "blocks.0.attn.out_proj.weight", "blocks.0.ln2.scale", "blocks.0.ln2.shift",
            "blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "blocks.1.ln1.scale",
            "blocks.1.ln1.shift", "blocks.1.attn.qkv.weight", "blocks.1.attn.out_proj.weight",
            "blocks.1.ln2.scale", "blocks.1.ln2.shift", "blocks.1.mlp.fc1.weight",
            "blocks.1.mlp.fc2.weight", "final_ln.scale", "final_ln.shift"}));
}

// The reason for pre-LN: behind six post-LN blocks, hardly any gradient of sum(out²) reaches the
// embedding.
TEST_F(BlockStackTest, PreLnKeepsTheGradientAliveThroughSixBlocks) {
  const auto embedding_gradient = [](bool pre_ln) {
    const auto options = BlockOptions()
                             .d_model(192)
                             .num_heads(6)
                             .context_length(64)
                             .attn_dropout(0.0)
                             .residual_dropout(0.0)
                             .pre_ln(pre_ln);
    torch::manual_seed(0);
    BlockStack stack(options, /*depth=*/6);
    EXPECT_EQ(count_parameters(*stack), 2'694'144);
    const auto tokens = torch::randint(0, 128, {2, 64});
    stack(tokens).square().sum().backward();
    return stack->embed->weight.grad().norm().item<double>();
  };
  const double with_pre_ln = embedding_gradient(true);
  const double with_post_ln = embedding_gradient(false);
  EXPECT_GT(with_pre_ln, 100 * with_post_ln);
  EXPECT_GT(with_post_ln, 0.0);
}

TEST_F(BlockStackTest, LeftPaddedRowsEqualTheUnpaddedRun) {
  for (const auto implementation : kImplementations) {
    SCOPED_TRACE(name_of(implementation));
    BlockStack stack(small().implementation(implementation), /*depth=*/2);
    const auto tokens = torch::randint(0, 128, {2, 7});
    auto mask = torch::zeros({2, 7}, torch::kBool);
    mask[1].narrow(0, 0, 3).fill_(true);  // these queries see no key at all
    const auto y = stack(tokens, mask);
    EXPECT_TRUE(y.isfinite().all().item<bool>());
    EXPECT_TRUE(all_close(y[0], stack(tokens)[0]));
    EXPECT_TRUE(all_close(y[1].narrow(0, 3, 4), stack(tokens.narrow(1, 3, 4))[1]));
    y.sum().backward();
    for (const auto& parameter : stack->named_parameters()) {
      EXPECT_TRUE(parameter.value().grad().isfinite().all().item<bool>()) << parameter.key();
    }
  }
}

TEST_F(BlockStackTest, AcceptsSingleTokensEmptyBatchesAndInt32) {
  BlockStack stack(small(), /*depth=*/2);
  EXPECT_EQ(stack(torch::randint(0, 128, {3, 1})).sizes(), torch::IntArrayRef({3, 1, 12}));
  EXPECT_EQ(stack(torch::zeros({0, 4}, torch::kLong)).sizes(), torch::IntArrayRef({0, 4, 12}));
  const auto tokens = torch::randint(0, 128, {2, 8});
  EXPECT_TRUE(all_equal(stack(tokens.to(torch::kInt)), stack(tokens)));
}

TEST_F(BlockStackTest, RejectsIdsAndLengthsByNameAndStaysUsable) {
  BlockStack stack(BlockStackOptions(small(), 1).vocab_size(10));
  const auto good = torch::randint(0, 10, {1, 8});
  const auto y = stack(good);
  const auto message = [&](const torch::Tensor& ids) { return value_error([&] { stack(ids); }); };
  EXPECT_TRUE(mentions(message(torch::tensor({{1, 10}})), {"ids", "vocab_size (10)", "got 10"}));
  EXPECT_TRUE(mentions(message(torch::tensor({{-1, 3}})), {"ids", "got -1"}));
  EXPECT_TRUE(mentions(message(torch::ones({1, 3})), {"ids", "int64", "Float"}));
  EXPECT_TRUE(mentions(message(torch::tensor({1, 2})), {"ids", "2-D", "[2]"}));
  EXPECT_TRUE(
      mentions(message(torch::zeros({1, 9}, torch::kLong)), {"context_length (8)", "got 9"}));
  EXPECT_TRUE(all_equal(stack(good), y));
}

TEST_F(BlockStackTest, RejectsSizesThatDoNotFit) {
  const auto message = [](const BlockStackOptions& options) {
    return value_error([&] { BlockStack stack(options); });
  };
  EXPECT_TRUE(mentions(message({small(), 0}), {"depth", "1", "got 0"}));
  EXPECT_TRUE(mentions(message({small(), -1}), {"depth", "1", "got -1"}));
  EXPECT_TRUE(
      mentions(message(BlockStackOptions(small(), 1).vocab_size(0)), {"vocab_size", "1", "got 0"}));
  EXPECT_TRUE(mentions(message({small().num_heads(5), 1}), {"num_heads (5)", "got 12"}));
  EXPECT_TRUE(mentions(message({small().d_model(-12), 1}), {"d_model", "1", "got -12"}));
}

}  // namespace
}  // namespace attn::testing
