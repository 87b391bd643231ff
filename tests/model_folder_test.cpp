#include "attn/model_folder.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/mentions.h"
#include "support/temporary_folder.h"

#include <attn/models/gpt.h>
#include <attn/models/tiny_attention_lm.h>
#include <attn/modules/self_attention.h>

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace attn::testing {
namespace {

namespace fs = std::filesystem;

GPT small_gpt(int64_t vocab_size = 256) {
  torch::manual_seed(3);
  GPT model(
      GPTOptions().vocab_size(vocab_size).context_length(8).d_model(8).num_heads(2).num_layers(2));
  model->eval();
  return model;
}

TEST(ModelFolder, BringsAGPTAndItsTokenizerBack) {
  const TemporaryFolder folder;
  auto model = small_gpt();
  save_language_model(*model, ByteLevelBPE::bytes(), folder / "new/run");
  const auto loaded = load_language_model(folder / "new/run");
  EXPECT_FALSE(loaded.model->module()->is_training());
  const auto ids = torch::randint(0, 256, {2, 8});
  EXPECT_TRUE(
      all_equal(loaded.model->last_logits(ids, {}, nullptr), model->last_logits(ids, {}, nullptr)));
  ASSERT_TRUE(loaded.tokenizer);
  std::string every;
  for (int b = 0; b < 256; ++b) every += static_cast<char>(b);
  const auto bytes = loaded.tokenizer->encode(every);
  ASSERT_EQ(bytes.size(), 256U);
  for (int64_t b = 0; b < 256; ++b) EXPECT_EQ(bytes[static_cast<size_t>(b)], b);
  EXPECT_EQ(loaded.tokenizer->decode(bytes), every);
}

TEST(ModelFolder, BringsATinyAttentionLMBack) {
  const TemporaryFolder folder;
  TinyAttentionLM model(/*vocab_size=*/20, /*d_model=*/8, /*n_heads=*/2, /*max_context_length=*/6);
  save_language_model(*model, std::nullopt, folder.path());
  const auto loaded = load_language_model(folder.path(), c10::kCPU, c10::kDouble);
  EXPECT_FALSE(loaded.tokenizer);
  EXPECT_EQ(loaded.model->context_length(), 6);
  const auto ids = torch::randint(0, 20, {2, 6});
  model->to(torch::kFloat64);
  EXPECT_TRUE(
      all_equal(loaded.model->last_logits(ids, {}, nullptr), model->last_logits(ids, {}, nullptr)));
}

TEST(ModelFolder, OfATrainingRunIsItsBestModel) {
  const TemporaryFolder folder;
  save_language_model(*small_gpt(), std::nullopt, folder / "best");
  EXPECT_EQ(load_language_model(folder.path()).model->vocab_size(), 256);
}

TEST(ModelFolder, WhatDoesNotFitIsNamed) {
  const TemporaryFolder folder;
  const auto refusal = [&] { return value_error([&] { load_language_model(folder.path()); }); };
  EXPECT_TRUE(mentions(refusal(), {folder.path().string(), "config.json"}));
  EXPECT_TRUE(
      mentions(value_error([&] { load_language_model(folder / "none"); }), {"none", "no such"}));
  TinyAttentionLM tiny(20, 8, 2, 6);
  save_language_model(*tiny, std::nullopt, folder.path());
  const auto with = [&](const std::string& entries) {
    write_bytes(folder / "config.json",
                "{\"model_type\": \"attn_tiny_attention_lm\"" + entries + "}");
    return refusal();
  };
  EXPECT_TRUE(mentions(with(""), {"config.json", "vocab_size"}));
  EXPECT_TRUE(mentions(with(", \"vocab_size\": 2000000000, \"d_model\": 2000000000, "
                            "\"n_heads\": 2, \"max_context_length\": 6"),
                       {"token_emb.embedding.weight", "[20, 8]"}));
  EXPECT_TRUE(mentions(with(", \"vocab_size\": 20, \"d_model\": 8, \"n_heads\": 2, "
                            "\"max_context_length\": 2000000000"),
                       {"max_context_length"}));
  write_bytes(folder / "config.json", "{\"model_type\": \"bert\"}");
  EXPECT_TRUE(mentions(refusal(), {"model_type", "bert"}));

  EXPECT_TRUE(mentions(value_error([&] {
                         save_language_model(*small_gpt(20), ByteLevelBPE::bytes(), folder.path());
                       }),
                       {"at most the model's 20", "256"}));
  SelfAttention other(8, 2);
  EXPECT_TRUE(mentions(
      value_error([&] { save_language_model(*other, std::nullopt, folder.path()); }), {"a GPT"}));
}

TEST(ModelFolder, SavesATokenizerWithMerges) {
  const TemporaryFolder folder;
  const auto original = ByteLevelBPE::from_files(fs::path(ATTN_GOLDEN_DIR) / "bpe/vocab.json",
                                                 fs::path(ATTN_GOLDEN_DIR) / "bpe/merges.txt");
  original.save(folder.path());
  const auto again = ByteLevelBPE::from_folder(folder.path());
  const std::string text = "The quick brown fox, 1234 times; déjà vu \xff<|endoftext|> 你好\n";
  EXPECT_EQ(again.encode(text), original.encode(text));
  EXPECT_EQ(again.vocab_size(), original.vocab_size());
  again.save(folder.path());
  EXPECT_EQ(read_bytes(folder / "merges.txt").substr(0, 14), "#version: 0.2\n");
}

}  // namespace
}  // namespace attn::testing
