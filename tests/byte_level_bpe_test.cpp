#include "attn/byte_level_bpe.h"

#include "support/expect_error.h"
#include "support/mentions.h"
#include "support/temporary_folder.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <random>
#include <string>
#include <vector>

namespace attn::testing {
namespace {

namespace fs = std::filesystem;
using Ids = std::vector<int64_t>;

const fs::path& golden_folder() {
  static const fs::path path = ATTN_GOLDEN_DIR;
  return path;
}

ByteLevelBPE tokenizer() {
  return ByteLevelBPE::from_folder(golden_folder() / "bpe");
}

TEST(ByteLevelBPE, GivesTheIdsOfTokenizers) {
  const auto cases = nlohmann::json::parse(read_bytes(golden_folder() / "bpe_cases.json"));
  ASSERT_GT(cases.size(), 30);
  const auto by_json =
      ByteLevelBPE::from_tokenizer_json(golden_folder() / "bpe" / "tokenizer.json");
  const auto by_files = ByteLevelBPE::from_files(golden_folder() / "bpe" / "vocab.json",
                                                 golden_folder() / "bpe" / "merges.txt");
  EXPECT_EQ(by_json.vocab_size(), 600);
  for (const auto& c : cases) {
    const auto text = c["text"].get<std::string>();
    EXPECT_EQ(by_json.encode(text), c["ids"].get<Ids>()) << text;
    EXPECT_EQ(by_files.encode(text), c["ids"].get<Ids>()) << text;
    EXPECT_EQ(by_json.decode(by_json.encode(text)), text);
  }
}

TEST(ByteLevelBPE, LosesNoByte) {
  const auto bpe = tokenizer();
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::string bytes(random() % 60, '\0');
    for (auto& byte : bytes)
      byte = static_cast<char>(random() % 4 == 0 ? 0x80 + random() % 0x80 : random() % 0x80);
    EXPECT_EQ(bpe.decode(bpe.encode(bytes)), bytes);
  }
  for (const std::string bytes : {"\xff", "a\xc3", "\xe2\x82", "\xed\xa0\x80", "ok \xf0\x9f\x98 x"})
    EXPECT_EQ(bpe.decode(bpe.encode(bytes)), bytes);
}

TEST(ByteLevelBPE, StreamsWholeCharactersOnly) {
  const auto bpe = tokenizer();
  const std::string text = "né 注意 😀 \xff end";
  StreamingDecoder decoder(bpe);
  std::string all;
  for (const int64_t id : bpe.encode(text)) {
    const auto part = decoder.push(id);
    // A part ends where a character ends: what follows never begins with a continuation byte.
    const bool whole = part.empty() || (static_cast<unsigned char>(part[0]) & 0xC0) != 0x80;
    EXPECT_TRUE(whole || part == "\xff") << all;
    all += part;
  }
  EXPECT_EQ(all + decoder.finish(), text);
  StreamingDecoder broken(bpe);
  EXPECT_EQ(broken.push(bpe.encode("\xe2")[0]), "");
  EXPECT_EQ(broken.finish(), "\xe2");
}

TEST(ByteLevelBPE, SkipsIdsWithoutATokenAndKnowsItsSpellings) {
  const auto bpe = tokenizer();
  EXPECT_EQ(bpe.decode(Ids{-1, 600, 1'000'000}), "");
  EXPECT_EQ(bpe.token_to_id("<|endoftext|>"), 0);
  EXPECT_EQ(bpe.id_to_token(0), "<|endoftext|>");
  EXPECT_EQ(bpe.token_to_id("no such token"), std::nullopt);
  EXPECT_EQ(bpe.id_to_token(600), std::nullopt);
}

// Neither a merge that looks at all pairs again nor a rescan of the word: a megabyte in a blink.
TEST(ByteLevelBPE, LongRunsTakeNoQuadraticTime) {
  const auto bpe = tokenizer();
  for (const char c : {'a', ' ', '\n', '\xff'}) {
    const std::string run(1 << 20, c);
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(bpe.decode(bpe.encode(run)).size(), run.size());
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));  // minutes else
  }
}

class BPEFiles : public ::testing::Test {
 protected:
  std::string refusal(const std::string& vocab, const std::string& merges) {
    write_bytes(folder_ / "vocab.json", vocab);
    write_bytes(folder_ / "merges.txt", merges);
    return value_error(
        [&] { ByteLevelBPE::from_files(folder_ / "vocab.json", folder_ / "merges.txt"); });
  }
  std::string refusal_json(const nlohmann::json& file) {
    write_bytes(folder_ / "tokenizer.json", file.dump());
    return value_error([&] { ByteLevelBPE::from_tokenizer_json(folder_ / "tokenizer.json"); });
  }
  std::string vocab_ = read_bytes(golden_folder() / "bpe" / "vocab.json");
  std::string merges_ = read_bytes(golden_folder() / "bpe" / "merges.txt");
  TemporaryFolder folder_;
};

TEST_F(BPEFiles, RefusesWhatDoesNotFitByName) {
  EXPECT_TRUE(mentions(refusal("{", merges_), {"vocab.json"}));
  EXPECT_TRUE(mentions(refusal("[]", merges_), {"vocab.json"}));
  EXPECT_TRUE(mentions(refusal(R"({"a": -1})", merges_), {"vocab.json", "-1"}));
  EXPECT_TRUE(mentions(refusal(R"({"a": 0.5})", merges_), {"vocab.json"}));
  EXPECT_TRUE(mentions(refusal(R"({"a": 99999999999999999999})", merges_), {"vocab.json"}));
  EXPECT_TRUE(
      mentions(refusal(R"({"a": 0})", "#version: 0.2\n"), {"vocab.json"}));  // bytes missing
  EXPECT_TRUE(mentions(refusal(vocab_, "#version: 0.2\nnever known\n"), {"merges.txt"}));
  EXPECT_TRUE(mentions(refusal(vocab_, "#version: 0.2\none\n"), {"merges.txt"}));
  EXPECT_TRUE(mentions(refusal(std::string(100'000, '['), merges_), {"vocab.json"}));
  EXPECT_THROW(ByteLevelBPE::from_folder(folder_ / "gone"), c10::ValueError);
}

TEST_F(BPEFiles, RefusesAnotherAlgorithmByName) {
  const auto good = nlohmann::json::parse(read_bytes(golden_folder() / "bpe" / "tokenizer.json"));
  const auto with = [&](const char* key, const nlohmann::json& value) {
    auto file = good;
    file[nlohmann::json::json_pointer(key)] = value;
    return refusal_json(file);
  };
  EXPECT_TRUE(mentions(with("/normalizer", {{"type", "Lowercase"}}), {"normalizer"}));
  EXPECT_TRUE(mentions(with("/pre_tokenizer", {{"type", "Whitespace"}}), {"pre_tokenizer"}));
  EXPECT_TRUE(mentions(with("/model/type", "WordPiece"), {"WordPiece"}));
  EXPECT_TRUE(mentions(with("/model/dropout", 0.1), {"dropout"}));
  // A template that adds tokens; the text alone, as transformers 5 writes it, is what we do.
  const nlohmann::json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const nlohmann::json special = {{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}};
  const auto with_template = [&](const nlohmann::json& single) {
    return with("/post_processor", {{"type", "TemplateProcessing"},
                                    {"single", single},
                                    {"pair", nlohmann::json::array()},
                                    {"special_tokens", nlohmann::json::object()}});
  };
  EXPECT_TRUE(mentions(with_template({special, text}), {"post_processor", "text alone"}));
  EXPECT_TRUE(mentions(with_template(nlohmann::json::array()), {"post_processor"}));
  const auto good_template = [&] {
    auto file = good;
    file["post_processor"] = {{"type", "TemplateProcessing"}, {"single", {text}}};
    return file;
  }();
  write_bytes(folder_ / "tokenizer.json", good_template.dump());
  EXPECT_EQ(ByteLevelBPE::from_tokenizer_json(folder_ / "tokenizer.json").encode("a b"),
            ByteLevelBPE::from_folder(golden_folder() / "bpe").encode("a b"));
  EXPECT_TRUE(mentions(refusal_json(nlohmann::json::array()), {"tokenizer.json"}));
}

TEST_F(BPEFiles, NoTruncationIsAccepted) {
  const auto whole = read_bytes(golden_folder() / "bpe" / "tokenizer.json");
  for (size_t size = 0; size + 2 < whole.size(); size += 331) {
    write_bytes(folder_ / "tokenizer.json", whole.substr(0, size));
    EXPECT_THROW(ByteLevelBPE::from_tokenizer_json(folder_ / "tokenizer.json"), c10::ValueError)
        << size;
  }
}

}  // namespace
}  // namespace attn::testing
