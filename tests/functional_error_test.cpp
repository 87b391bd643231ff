#include "attn/functional.h"
#include "support/expect_error.h"
#include "support/mentions.h"

#include <ATen/Functions.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <limits>

namespace attn::testing {
namespace {

using functional::AttentionOptions;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Parts = std::initializer_list<std::string>;

/// attention and attention_with_weights refuse with the same message, in which each part occurs.
void expect_refused(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v,
                    const AttentionOptions& options, Parts parts) {
  const auto message = value_error([&] { functional::attention(q, k, v, options); });
  EXPECT_TRUE(mentions(message, parts));
  EXPECT_EQ(value_error([&] { functional::attention_with_weights(q, k, v, options); }), message);
}

void expect_refused(const torch::Tensor& qkv, int64_t n_head, const AttentionOptions& options,
                    Parts parts) {
  const auto message =
      value_error([&] { functional::packed_self_attention(qkv, n_head, options); });
  EXPECT_TRUE(mentions(message, parts));
  EXPECT_EQ(
      value_error([&] { functional::packed_self_attention_with_weights(qkv, n_head, options); }),
      message);
}

// The sizes differ from one another, so that a message can't name the right number by chance.
const std::vector<int64_t> kQ = {2, 6, 5, 4};   // [B, H, T, D]
const std::vector<int64_t> kKV = {2, 3, 7, 4};  // [B, Hkv, S, D]

TEST(AttentionErrors, NameTheMaskThatDoesNotFit) {
  const auto q = torch::ones(kQ), kv = torch::ones(kKV);
  const auto refuses = [&](const torch::Tensor& mask, Parts parts) {
    expect_refused(q, kv, kv, AttentionOptions().key_padding_mask(mask), parts);
  };
  refuses(torch::zeros({2, 5}, torch::kBool),
          {"key_padding_mask must be", "[2, 7]", "got shape [2, 5]"});
  refuses(torch::zeros({3, 7}, torch::kBool), {"[2, 7]", "got shape [3, 7]"});
  refuses(torch::zeros({1, 7}, torch::kBool), {"[2, 7]", "got shape [1, 7]"});  // no broadcasting
  refuses(torch::zeros({7}, torch::kBool), {"[2, 7]", "got shape [7]"});
  refuses(torch::zeros({2, 1, 7}, torch::kBool), {"[2, 7]", "got shape [2, 1, 7]"});
  refuses(torch::zeros({2, 7}), {"key_padding_mask must be bool", "got Float"});
  refuses(torch::zeros({2, 7}, torch::kLong), {"key_padding_mask must be bool", "got Long"});
  refuses(torch::zeros({2, 7}, torch::dtype(torch::kBool).device(torch::kMeta)),
          {"key_padding_mask must be on", "cpu", "got meta"});
}

TEST(AttentionErrors, NameTheOptionThatDoesNotFit) {
  const auto q = torch::ones(kQ), kv = torch::ones(kKV);
  const auto refuses = [&](const AttentionOptions& options, Parts parts) {
    expect_refused(q, kv, kv, options, parts);
  };
  refuses(AttentionOptions().dropout_p(-0.5), {"dropout_p must be in [0, 1]", "got -0.5"});
  refuses(AttentionOptions().dropout_p(1.5), {"dropout_p must be in [0, 1]", "got 1.5"});
  refuses(AttentionOptions().dropout_p(kNaN), {"dropout_p must be in [0, 1]", "got nan"});
  refuses(AttentionOptions().dropout_p(kInfinity), {"dropout_p must be in [0, 1]", "got inf"});
  refuses(AttentionOptions().scale(kInfinity), {"scale must be finite", "got inf"});
  refuses(AttentionOptions().scale(-kInfinity), {"scale must be finite", "got -inf"});
  refuses(AttentionOptions().scale(kNaN), {"scale must be finite", "got nan"});
}

TEST(AttentionErrors, NameTheTensorThatDoesNotFit) {
  const auto q = torch::ones(kQ), kv = torch::ones(kKV);
  const auto refuses = [](const torch::Tensor& a, const torch::Tensor& b, const torch::Tensor& c,
                          Parts parts) { expect_refused(a, b, c, {}, parts); };
  refuses({}, kv, kv, {"q must be a tensor", "undefined"});
  refuses(q, {}, kv, {"k must be a tensor", "undefined"});
  refuses(q, kv, {}, {"v must be a tensor", "undefined"});
  refuses(q[0], kv, kv, {"q must be 4-D", "got shape [6, 5, 4]"});
  refuses(q, kv[0], kv, {"k must be 4-D", "got shape [3, 7, 4]"});
  refuses(q, kv, kv.unsqueeze(0), {"v must be 4-D", "got shape [1, 2, 3, 7, 4]"});
  refuses(q.to(torch::kLong), kv, kv, {"q must be floating-point", "got Long"});
  refuses(q, kv.to(torch::kBool), kv, {"k must be floating-point", "got Bool"});
  refuses(q, kv, kv.to(torch::kComplexFloat), {"v must be floating-point", "got ComplexFloat"});
  refuses(q, kv.to(torch::kFloat64), kv, {"k must have q's dtype", "Float", "got Double"});
  refuses(q, kv, kv.to(torch::kBFloat16), {"v must have q's dtype", "Float", "got BFloat16"});
  refuses(q, kv.to(torch::kMeta), kv, {"k must be on q's device", "cpu", "got meta"});
  refuses(q, kv, kv.to(torch::kMeta), {"v must be on q's device", "cpu", "got meta"});
}

TEST(AttentionErrors, NameTheShapeThatDoesNotFit) {
  const auto q = torch::ones(kQ), kv = torch::ones(kKV);
  const auto refuses = [&](const torch::Tensor& k, const torch::Tensor& v, Parts parts) {
    expect_refused(q, k, v, {}, parts);
  };
  refuses(kv, kv.narrow(2, 0, 6),
          {"v must have k's shape", "[2, 3, 7, 4]", "got shape [2, 3, 6, 4]"});
  refuses(kv, kv.narrow(3, 0, 2), {"v must have k's shape", "got shape [2, 3, 7, 2]"});
  const auto narrow = kv.narrow(3, 0, 2);
  refuses(narrow, narrow, {"k must have q's", "head width", "(2 and 4)", "got shape [2, 3, 7, 2]"});
  const auto one_row = kv.narrow(0, 0, 1);
  refuses(one_row, one_row, {"k must have q's batch size", "(2 and 4)", "got shape [1, 3, 7, 4]"});
  const auto four_heads = torch::ones({2, 4, 7, 4});
  refuses(four_heads, four_heads, {"number of heads", "a multiple of", "(4)", "got 6"});
  const auto no_heads = kv.narrow(1, 0, 0);
  refuses(no_heads, no_heads, {"at least 1 head", "got 6 and 0"});
  const auto empty = torch::ones({2, 6, 5, 0});
  expect_refused(empty, empty, empty, {}, {"head width must be at least 1", "got 0"});
}

TEST(AttentionErrors, NameThePackedWidthThatDoesNotFit) {
  const auto qkv = torch::ones({2, 5, 36});
  expect_refused(qkv, 5, {}, {"multiple of 3 * n_head (15)", "got 36"});
  expect_refused(torch::ones({2, 5, 35}), 1, {}, {"multiple of 3 * n_head (3)", "got 35"});
  expect_refused(torch::ones({2, 5, 0}), 2, {}, {"multiple of 3 * n_head (6)", "got 0"});
  expect_refused(qkv, 0, {}, {"n_head must be at least 1", "got 0"});
  expect_refused(qkv, -3, {}, {"n_head must be at least 1", "got -3"});
  expect_refused(qkv[0], 3, {}, {"qkv must be 3-D", "got shape [5, 36]"});
  expect_refused(qkv.unsqueeze(0), 3, {}, {"qkv must be 3-D", "got shape [1, 2, 5, 36]"});
  expect_refused(qkv.to(torch::kInt), 3, {}, {"floating-point", "got Int"});
  expect_refused(torch::Tensor(), 3, {}, {"qkv must be a tensor", "undefined"});
  expect_refused(qkv, 3, AttentionOptions().dropout_p(2.0), {"dropout_p", "got 2"});
  expect_refused(qkv, 3, AttentionOptions().key_padding_mask(torch::zeros({2, 4}, torch::kBool)),
                 {"key_padding_mask", "[2, 5]", "got shape [2, 4]"});
}

TEST(AttentionErrors, NameWhatTheFusedOperationCannotDo) {
  const auto q = torch::ones({1, 2, 5, 4}, torch::kFloat64);
  const auto message = value_error([&] {
    functional::attention(q, q, q, AttentionOptions().implementation(Implementation::fused));
  });
  EXPECT_TRUE(mentions(message, {"fused", "dtype Double", "[1, 2, 5, 4]"}));
}

TEST(AttentionErrors, NameTheHeadsThatCannotBeSplitOrMerged) {
  const auto split = [](const torch::Tensor& x, int64_t n_head) {
    return value_error([&] { functional::split_heads(x, n_head); });
  };
  EXPECT_TRUE(mentions(split(torch::ones({2, 5, 8}), 3), {"x", "n_head (3)", "got 8"}));
  EXPECT_TRUE(mentions(split(torch::ones({2, 5, 8}), 0), {"n_head must be at least 1", "got 0"}));
  EXPECT_TRUE(mentions(split(torch::ones({5, 8}), 2), {"x must be 3-D", "got shape [5, 8]"}));
  EXPECT_TRUE(mentions(split(torch::Tensor(), 2), {"x must be"}));
  const auto merge = [](const torch::Tensor& x) {
    return value_error([&] { functional::merge_heads(x); });
  };
  EXPECT_TRUE(mentions(merge(torch::ones({2, 5, 8})), {"x must be 4-D", "got shape [2, 5, 8]"}));
  EXPECT_TRUE(mentions(merge(torch::Tensor()), {"x must be"}));
}

}  // namespace
}  // namespace attn::testing
