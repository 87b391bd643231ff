#include "attn/modules/multi_head_attention.h"

#include "support/attention_contract.h"
#include "support/dropout_contract.h"
#include "support/golden_module.h"

#include <attn/state_dict.h>

#include <gtest/gtest.h>

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

struct MultiHeadAttentionTraits {
  static constexpr const char* kWidth = "d_model";
  static constexpr const char* kOutDropout = "residual_dropout";
  static MultiHeadAttention make(int64_t width, int64_t heads, bool causal,
                                 Implementation implementation) {
    return MultiHeadAttention(
        small().d_model(width).num_heads(heads).causal(causal).implementation(implementation));
  }
  static MultiHeadAttention make(int64_t width, int64_t heads, double attn_dropout,
                                 double out_dropout, Implementation implementation) {
    return MultiHeadAttention(small()
                                  .d_model(width)
                                  .num_heads(heads)
                                  .attn_dropout(attn_dropout)
                                  .residual_dropout(out_dropout)
                                  .implementation(implementation));
  }
  static torch::nn::Linear in(MultiHeadAttention& module) { return module->qkv; }
  static torch::nn::Linear out(MultiHeadAttention& module) { return module->out_proj; }
  static torch::nn::Dropout attn_dropout(MultiHeadAttention& module) {
    return module->attn_dropout;
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(MultiHeadAttention, AttentionContract, MultiHeadAttentionTraits);
INSTANTIATE_TYPED_TEST_SUITE_P(MultiHeadAttention, DropoutContract, MultiHeadAttentionTraits);

TEST(MultiHeadAttention, HasPythonsKeysInPythonsOrder) {
  EXPECT_EQ(state_dict(*MultiHeadAttention(small())).keys(),
            Keys({"qkv.weight", "qkv.bias", "out_proj.weight", "out_proj.bias"}));
  EXPECT_EQ(state_dict(*MultiHeadAttention(small().use_bias(false))).keys(),
            Keys({"qkv.weight", "out_proj.weight"}));
}

TEST(MultiHeadAttention, WithoutBiasesZerosGiveZeros) {
  MultiHeadAttention module(small().use_bias(false));
  const auto x = torch::zeros({1, 3, 12});
  EXPECT_TRUE(all_equal(module(x), x));
  EXPECT_FALSE(all_close(MultiHeadAttention(small())(x), x));
}

TEST(MultiHeadAttention, AcceptsTheLongestContextAndNothingLonger) {
  MultiHeadAttention module(small());
  EXPECT_EQ(module(torch::randn({1, 8, 12})).sizes(), torch::IntArrayRef({1, 8, 12}));
  const auto x = torch::randn({1, 9, 12});
  EXPECT_TRUE(mentions(value_error([&] { module(x); }), {"context_length (8)", "got 9"}));
  EXPECT_TRUE(mentions(value_error([&] { module->forward_with_weights(x); }),
                       {"context_length (8)", "got 9"}));
}

TEST(MultiHeadAttention, RejectsSizesThatDoNotFit) {
  const auto message = [](const BlockOptions& options) {
    return value_error([&] { MultiHeadAttention module(options); });
  };
  EXPECT_EQ(message(small().num_heads(5)), "d_model must be a multiple of num_heads (5), got 12");
  for (const int64_t wrong : {0, -3}) {
    const auto got = "got " + std::to_string(wrong);
    EXPECT_TRUE(mentions(message(small().d_model(wrong)), {"d_model", "1", got}));
    EXPECT_TRUE(mentions(message(small().num_heads(wrong)), {"num_heads", "1", got}));
    EXPECT_TRUE(mentions(message(small().context_length(wrong)), {"context_length", "1", got}));
  }
}

TEST(MultiHeadAttention, TheDefaultsAreTheReferences) {
  const BlockOptions options;
  EXPECT_EQ(options.d_model(), 768);
  EXPECT_EQ(options.num_heads(), 12);
  EXPECT_EQ(options.context_length(), 1024);
  EXPECT_EQ(options.mlp_expansion(), 4);
  EXPECT_EQ(options.attn_dropout(), 0.1);
  EXPECT_EQ(options.residual_dropout(), 0.1);
  EXPECT_EQ(options.layer_norm_eps(), 1e-5);
  EXPECT_EQ(options.activation(), Activation::gelu_tanh);
  EXPECT_TRUE(options.use_bias());
  EXPECT_TRUE(options.pre_ln());
  EXPECT_TRUE(options.causal());
}

}  // namespace
}  // namespace attn::testing
