// attn_generate from outside: what it prints for which model and prompt, and how it fails.

#include "../support/temporary_folder.h"
#include "process.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using attn::testing::TemporaryFolder;
using attn::testing::write_bytes;
using process::Out;
using process::Result;
using Strings = std::vector<std::string>;

const std::string kGPT2 = std::string(ATTN_GOLDEN_DIR) + "/gpt2";

Result generate(const Strings& arguments, Out out = Out::pipe) {
  return process::run(ATTN_GENERATE, arguments, {}, out);
}

::testing::AssertionResult fails(const Result& result, int code, const Strings& words) {
  if (result.exit_code != code) {
    return ::testing::AssertionFailure() << "exit code " << result.exit_code << ": " << result.err;
  }
  if (std::count(result.err.begin(), result.err.end(), '\n') != 1 || !result.out.empty() ||
      !result.err.starts_with("attn_generate: ")) {
    return ::testing::AssertionFailure() << "not one line: " << result.err << result.out;
  }
  for (const auto& word : words) {
    if (result.err.find(word) == std::string::npos) {
      return ::testing::AssertionFailure() << word << " is not in: " << result.err;
    }
  }
  return ::testing::AssertionSuccess();
}

std::string joined(const nlohmann::json& ids) {
  std::ostringstream out;
  for (size_t i = 0; i < ids.size(); ++i) out << (i == 0 ? "" : ",") << ids[i];
  return out.str();
}

// The ids that transformers generates greedily: the golden's, as generate_gpt2.py prints them.
TEST(Generate, ContinuesIdsAsTransformersDoes) {
  std::ifstream file(std::string(ATTN_GOLDEN_DIR) + "/gpt2_greedy.json");
  const auto golden = nlohmann::json::parse(file);
  for (const auto& row : golden) {
    const auto prompt = joined(row["prompt"]), expected = joined(row["added"]);
    const auto result = generate({"--model", kGPT2, "--ids", prompt, "--temperature", "0",
                                  "--max-new-tokens", std::to_string(row["added"].size())});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, expected + "\n");
  }
}

TEST(Generate, TheDemoStreamsTextAndTellsItsSpeed) {
  const Strings arguments = {"--demo", "--seed", "1", "--max-new-tokens", "30"};
  const auto result = generate(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_GE(result.out.size(), 31U);
  EXPECT_NE(result.err.find("prompt: 9 tokens"), std::string::npos) << result.err;
  EXPECT_NE(result.err.find("then 29 tokens"), std::string::npos) << result.err;
  EXPECT_EQ(generate(arguments).out, result.out);
  EXPECT_NE(generate({"--demo", "--seed", "2", "--max-new-tokens", "30"}).out, result.out);
}

TEST(Generate, ATerminalGetsNoControlCharacters) {
  const auto result = generate({"--demo", "--seed", "1", "--max-new-tokens", "100"}, Out::terminal);
  for (const char c : result.out) {
    EXPECT_TRUE(c == '\n' || c == '\r' || c == '\t' || static_cast<unsigned char>(c) >= 0x20)
        << static_cast<int>(c);
  }
}

TEST(Generate, PrintsJson) {
  const auto result = generate({"--demo", "--json", "--prompt", "ab", "--max-new-tokens", "4",
                                "--temperature", "0", "--dtype", "float64"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json["prompt_ids"], nlohmann::json({97, 98}));
  EXPECT_EQ(json["ids"].size(), 4U);
  EXPECT_TRUE(json["text"].is_string());
  EXPECT_TRUE(json["seed"].is_number_unsigned());
}

TEST(Generate, EndsBeforeAStopText) {
  const Strings arguments = {"--demo", "--seed", "5", "--max-new-tokens", "60", "--json"};
  const auto whole = nlohmann::json::parse(generate(arguments).out);
  const auto ids = whole["ids"].get<std::vector<int>>();
  // Two ASCII characters that stand somewhere in the text.
  for (size_t i = 1; i + 1 < ids.size(); ++i) {
    const auto printable = [](int c) { return c > 32 && c < 127; };
    if (!printable(ids[i]) || !printable(ids[i + 1])) continue;
    const std::string stop = {static_cast<char>(ids[i]), static_cast<char>(ids[i + 1])};
    auto stopping = arguments;
    stopping.insert(stopping.end(), {"--stop", stop, "--stop", "never met"});
    const auto cut = nlohmann::json::parse(generate(stopping).out);
    EXPECT_EQ(cut["text"].get<std::string>().find(stop), std::string::npos);
    EXPECT_LE(cut["ids"].size(), i + 2);
    return;
  }
  FAIL() << "no two printable characters in " << whole["text"];
}

TEST(Generate, GoesOnBeyondTheContext) {
  const auto result = generate({"--demo", "--seed", "1", "--max-new-tokens", "140", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(nlohmann::json::parse(result.out)["ids"].size(), 140U);
}

TEST(Generate, UsageErrorsAreOneLineAndExitCode2) {
  EXPECT_TRUE(fails(generate({}), 2, {"--model", "--demo"}));
  EXPECT_TRUE(fails(generate({"--model", kGPT2}), 2, {"--prompt", "--ids", "--stdin"}));
  EXPECT_TRUE(fails(generate({"--demo", "--temperature", "nan"}), 2, {"nan"}));
  EXPECT_TRUE(fails(generate({"--demo", "--temperature", "-1"}), 2, {"-1"}));
  EXPECT_TRUE(fails(generate({"--demo", "--top-p", "0"}), 2, {"--top-p"}));
  EXPECT_TRUE(fails(generate({"--demo", "--top-k", "0"}), 2, {"--top-k"}));
  EXPECT_TRUE(fails(generate({"--demo", "--ids", "1,x"}), 2, {"x"}));
  EXPECT_TRUE(fails(generate({"--demo", "--stop", ""}), 2, {"--stop"}));
  EXPECT_TRUE(fails(generate({"--demo", "--dtype", "int8"}), 2, {"int8"}));
  EXPECT_TRUE(fails(generate({"--demo", "--device", "tpu"}), 2, {"tpu"}));
  EXPECT_TRUE(fails(generate({"--demo", "--prompt", "a", "--stdin"}), 2, {"--stdin"}));
  EXPECT_TRUE(fails(generate({"--demo", "--model", kGPT2, "--ids", "1"}), 2, {"--demo"}));
}

TEST(Generate, WhatDoesNotFitIsNamedWithARemedy) {
  EXPECT_TRUE(fails(generate({"--model", "/no/model", "--prompt", "a"}), 1, {"/no/model"}));
  EXPECT_TRUE(fails(generate({"--model", kGPT2, "--prompt", "a"}), 1, {"tokenizer.json", "--ids"}));
  EXPECT_TRUE(fails(generate({"--model", kGPT2, "--ids", "31"}), 1, {"below 31", "got 31"}));
  EXPECT_TRUE(fails(generate({"--model", kGPT2, "--ids", "1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8"}), 1,
                    {"at most 16", "got 17", "shorten"}));
  EXPECT_TRUE(fails(generate({"--demo", "--prompt", ""}), 1, {"at least one token"}));

  const TemporaryFolder folder;
  EXPECT_TRUE(
      fails(generate({"--model", folder.path().string(), "--ids", "1"}), 1, {"config.json"}));
  fs::copy(kGPT2, folder.path(), fs::copy_options::recursive);
  const auto bpe = std::string(ATTN_GOLDEN_DIR) + "/bpe/";
  fs::copy(bpe + "vocab.json", folder.path());
  EXPECT_TRUE(
      fails(generate({"--model", folder.path().string(), "--prompt", "a"}), 1, {"merges.txt"}));
  fs::copy(bpe + "merges.txt", folder.path());
  EXPECT_TRUE(fails(generate({"--model", folder.path().string(), "--prompt", "a"}), 1,
                    {"at most the model's 31 tokens", "take the tokenizer files"}));
  write_bytes(folder / "config.json", "{\"model_type\": \"llama\"}");
  EXPECT_TRUE(fails(generate({"--model", folder.path().string(), "--ids", "1"}), 1, {"llama"}));
  write_bytes(folder / "config.json", "{");
  EXPECT_TRUE(fails(generate({"--model", folder.path().string(), "--ids", "1"}), 1, {"JSON"}));
}

}  // namespace
