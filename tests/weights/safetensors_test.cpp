#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/mentions.h"
#include "support/temporary_folder.h"

#include <attn/weights.h>

#include <torch/types.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace attn::testing {
namespace {

namespace fs = std::filesystem;

/// A safetensors file's bytes from its parts.
std::string safetensors(const std::string& header, const std::string& data = "") {
  const uint64_t size = header.size();
  std::string bytes(reinterpret_cast<const char*>(&size), sizeof size);
  return bytes.append(header).append(data);
}

/// The same bits, shape and dtype; values that are no numbers included.
::testing::AssertionResult bit_equal(const torch::Tensor& actual, const torch::Tensor& expected) {
  if (actual.scalar_type() != expected.scalar_type() || actual.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure() << describe(actual) << ", not " << describe(expected);
  }
  const auto a = actual.contiguous(), b = expected.contiguous();
  if (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "other values";
}

void expect_bit_equal(const StateDict& actual, const StateDict& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& item : expected) {
    ASSERT_TRUE(actual.contains(item.key())) << item.key();
    EXPECT_TRUE(bit_equal(actual[item.key()], item.value())) << item.key();
  }
}

StateDict all_kinds() {
  torch::manual_seed(3);
  StateDict state;
  for (const auto dtype :
       {torch::kFloat32, torch::kFloat16, torch::kBFloat16, torch::kFloat64, torch::kInt64,
        torch::kInt32, torch::kInt16, torch::kInt8, torch::kUInt8, torch::kBool}) {
    state.insert(std::string(c10::toString(dtype)), (torch::randn({2, 3}) * 3).to(dtype));
  }
  state.insert("uint16", torch::arange(5).to(torch::kUInt16));
  state.insert("complex", torch::randn({2}, torch::kComplexFloat));
  state.insert("float8", torch::randn({3}).to(torch::kFloat8_e4m3fn));
  state.insert("nan", torch::full({1}, std::nan("")));
  state.insert("empty", torch::empty({0, 4}));
  state.insert("scalar", torch::tensor(2.5));
  state.insert("transposed", torch::randn({3, 4}).t());
  state.insert("every second", torch::arange(10).slice(0, 1, 10, 2));
  state.insert("Größe \u6ce8\u610f \"quoted\"\n", torch::ones({1}));
  state.insert(std::string(3000, 'n'), torch::ones({1}));
  return state;
}

class SafetensorsTest : public ::testing::Test {
 protected:
  std::string refusal(const std::string& bytes) {
    write_bytes(file_, bytes);
    const auto message = value_error([&] { load_weights(file_); });
    EXPECT_TRUE(mentions(message, {file_.string()}));
    return message;
  }

  TemporaryFolder folder_;
  fs::path file_ = folder_ / "w.safetensors";
};

TEST_F(SafetensorsTest, RoundTripIsBitExactForEveryKindOfTensor) {
  const auto state = all_kinds();
  save_weights(state, file_);
  expect_bit_equal(load_weights(file_), state);
  EXPECT_EQ(folder_.entries(), 1U);  // nothing beside it
}

TEST_F(SafetensorsTest, BytesAreTheFormats) {
  StateDict state;
  state.insert("b", torch::tensor({1.0F, 2.0F}));
  state.insert("a", torch::tensor({int64_t{3}}));
  save_weights(state, file_, {.metadata = {{"made", "here"}}});
  const auto bytes = read_bytes(file_);
  uint64_t size = 0;
  std::memcpy(&size, bytes.data(), sizeof size);
  EXPECT_EQ(size % 8, 0U);
  auto header = bytes.substr(8, size);
  header.resize(header.find_last_not_of(' ') + 1);
  EXPECT_EQ(header, R"({"__metadata__":{"format":"pt","made":"here"},)"
                    R"("a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
                    R"("b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})");
  EXPECT_EQ(bytes.size(), 8 + size + 16);
}

TEST_F(SafetensorsTest, MetadataComeBackAndMayBeMissing) {
  save_weights(StateDict(), file_, {.metadata = {{"format", "np"}, {"k", "v"}}});
  EXPECT_EQ(load_metadata(file_),
            (std::map<std::string, std::string>{{"format", "np"}, {"k", "v"}}));
  EXPECT_TRUE(load_weights(file_).is_empty());
  write_bytes(file_, safetensors("{}   "));
  EXPECT_TRUE(load_metadata(file_).empty());
  EXPECT_TRUE(load_weights(file_).is_empty());
}

TEST_F(SafetensorsTest, NamesOfOneTensorAreWrittenOnceAndComeBackShared) {
  const auto weight = torch::randn({4, 3});
  StateDict state;
  state.insert("tok_embed.weight", weight);
  state.insert("view", weight.slice(0, 0, 2));  // a part: its own bytes
  state.insert("lm_head.weight", weight.detach());
  save_weights(state, file_);
  EXPECT_EQ(load_metadata(file_).at("lm_head.weight"), "tok_embed.weight");
  EXPECT_EQ(read_bytes(file_).find(R"("lm_head.weight":{)"), std::string::npos);
  const auto loaded = load_weights(file_);
  expect_bit_equal(loaded, state);
  EXPECT_TRUE(loaded["lm_head.weight"].is_alias_of(loaded["tok_embed.weight"]));
}

TEST_F(SafetensorsTest, MisalignedTensorsAreReadToo) {
  const float value = 1.5F;
  std::string data = "x";
  data.append(reinterpret_cast<const char*>(&value), sizeof value);
  write_bytes(file_, safetensors(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                 R"("b":{"dtype":"F32","shape":[],"data_offsets":[1,5]}})",
                                 data));
  const auto b = load_weights(file_)["b"];
  EXPECT_EQ(b.item<float>(), value);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data_ptr()) % sizeof(float), 0U);
}

TEST_F(SafetensorsTest, WritingToATensorLeavesTheFileAlone) {
  StateDict state;
  state.insert("w", torch::ones({64}));
  save_weights(state, file_);
  const auto before = read_bytes(file_);
  auto loaded = load_weights(file_);
  loaded["w"].fill_(7);
  EXPECT_EQ(read_bytes(file_), before);
  save_weights(loaded, file_);  // over the file that is mapped
  EXPECT_TRUE(all_equal(loaded["w"], torch::full({64}, 7.0F)));
  EXPECT_TRUE(all_equal(load_weights(file_)["w"], torch::full({64}, 7.0F)));
}

TEST_F(SafetensorsTest, LoadingReadsNothingBeforeItIsUsed) {
  // 4 GB of a sparse file, and less memory than that for whoever wants to read it.
  const auto header = std::string(R"({"w":{"dtype":"F32","shape":[1073741824],)") +
                      R"("data_offsets":[0,4294967296]}})";
  write_bytes(file_, safetensors(header));
  fs::resize_file(file_, 8 + header.size() + (uint64_t{1} << 32));
  const auto resident = [] {
    std::ifstream statm("/proc/self/statm");
    size_t pages = 0;
    statm >> pages >> pages;
    return pages * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  };
  const auto before = resident();
  const auto start = std::chrono::steady_clock::now();
  const auto w = load_weights(file_)["w"];
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(w[1 << 29].item<float>(), 0.0F);
  EXPECT_LT(resident(), before + (size_t{64} << 20));
  EXPECT_LT(seconds.count(), 0.5);  // milliseconds; the rest is for a busy machine
}

TEST_F(SafetensorsTest, TruncatedAtEveryByteIsAnError) {
  StateDict state;
  state.insert("a", torch::ones({3}));
  state.insert("b", torch::ones({2}, torch::kInt64));
  save_weights(state, file_);
  const auto bytes = read_bytes(file_);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_NE(refusal(bytes.substr(0, size)), "") << size;
  }
}

TEST_F(SafetensorsTest, HostileHeadersAreRefused) {
  const std::string a = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)";
  std::string nested = R"({"a":)";
  nested.append(100'000, '[');
  struct Hostile {
    std::string header;
    std::vector<std::string> mentioned;
  };
  const std::vector<Hostile> all = {
      {"{", {"JSON"}},
      {R"({"a":1})", {"\"a\"", "object"}},
      {R"({"__metadata__":[]})", {"__metadata__"}},
      {R"({"__metadata__":{"k":1}})", {"strings", "\"k\""}},
      {R"({"a":{"shape":[4],"data_offsets":[0,4]}})", {"dtype"}},
      {R"({"a":{"dtype":"U8","data_offsets":[0,4]}})", {"shape"}},
      {R"({"a":{"dtype":"U8","shape":[4]}})", {"data_offsets"}},
      {R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", {"F33"}},
      {R"({"a":{"dtype":"f32","shape":[1],"data_offsets":[0,4]}})", {"f32"}},
      {R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", {"dtype", "number"}},
      {R"({"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}})", {"shape", "-4"}},
      {R"({"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}})", {"shape", "4.0"}},
      {R"({"a":{"dtype":"U8","shape":["4"],"data_offsets":[0,4]}})", {"shape"}},
      {R"({"a":{"dtype":"U8","shape":4,"data_offsets":[0,4]}})", {"shape"}},
      {R"({"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,4]}})", {"shape"}},
      {R"({"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,4]}})", {"JSON"}},
      {R"({"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", {"2^63"}},
      {R"({"a":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})", {"2^63"}},
      {R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", {"2^63"}},
      {a + "[0,3]}}", {"span", "4 bytes"}},
      {a + "[4,0]}}", {"span"}},
      {a + "[0]}}", {"two numbers"}},
      {a + "[0,4,8]}}", {"two numbers"}},
      {a + "[-1,3]}}", {"data_offsets", "-1"}},
      {a + "[18446744073709551612,18446744073709551616]}}", {"data_offsets"}},
      {a + "[1,5]}}", {"begin", "got 1"}},
      {a + R"([0,4]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})", {"\"b\"", "begin"}},
      {a + R"([0,4]},"b":{"dtype":"U8","shape":[2],"data_offsets":[5,7]}})", {"\"b\"", "begin"}},
      {a + R"([0,4]},"b":{"dtype":"U8","shape":[9],"data_offsets":[4,13]}})", {"truncated"}},
      {a + "[0,4]}}", {"all of the 8 bytes"}},
      {a + R"([0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", {"two of \"a\""}},
      {R"({"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}})", {"two of"}},
      {nested + std::string(100'000, ']') + "}", {"nested"}},
      {nested, {"nested"}},
      {R"({"a":{"dtype":"BOOL","shape":[8],"data_offsets":[0,8]}})", {"bools"}},
      {"{\"\xff\":1}", {"JSON"}},
  };
  for (const auto& [header, mentioned] : all) {
    const auto message = refusal(safetensors(header, "01234567"));
    for (const auto& part : mentioned) {
      EXPECT_TRUE(mentions(message, {part})) << header.substr(0, 200);
    }
    EXPECT_LT(message.size(), 1000U);
  }
}

TEST_F(SafetensorsTest, HeaderLengthMustLieInTheFile) {
  auto bytes = safetensors("{}");
  for (const uint64_t size : {uint64_t{3}, uint64_t{1} << 40, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    std::memcpy(bytes.data(), &size, sizeof size);
    EXPECT_NE(refusal(bytes), "");
    const auto message = value_error([&] { load_metadata(file_); });
    EXPECT_TRUE(mentions(message, {"header", "truncated"}));
  }
}

TEST_F(SafetensorsTest, OnlyRegularFilesAreOpened) {
  const auto pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_TRUE(mentions(value_error([&] { load_weights(pipe); }), {pipe.string(), "regular"}));
  const auto missing = folder_ / "missing";
  EXPECT_TRUE(mentions(value_error([&] { load_weights(missing); }),
                       {missing.string(), "No such file or directory"}));
}

TEST_F(SafetensorsTest, WhatHasNoPlaceInAFileIsRefusedAndTheOldFileStays) {
  write_bytes(file_, "old");
  const auto refused = [&](const std::string& name, const torch::Tensor& tensor) {
    StateDict state;
    state.insert(name, tensor);
    const auto message = value_error([&] { save_weights(state, file_); });
    EXPECT_EQ(read_bytes(file_), "old");
    EXPECT_EQ(folder_.entries(), 1U);
    return message;
  };
  EXPECT_TRUE(mentions(refused("w", {}), {"\"w\"", "defined"}));
  EXPECT_TRUE(mentions(refused("w", torch::eye(2).to_sparse()), {"\"w\"", "dense"}));
  EXPECT_TRUE(mentions(refused("w", torch::ones({2}, torch::kMeta)), {"\"w\"", "values"}));
  EXPECT_TRUE(mentions(refused("w", torch::ones({2}, torch::kComplexDouble)), {"\"w\"", "dtype"}));
  EXPECT_TRUE(mentions(refused("\xff", torch::ones({2})), {"UTF-8"}));
  EXPECT_TRUE(mentions(refused("__metadata__", torch::ones({2})), {"__metadata__"}));
  StateDict state;
  const auto other = folder_ / "w.npz";
  EXPECT_TRUE(
      mentions(value_error([&] { save_weights(state, other); }), {other.string(), "end in"}));
}

/// The message of the c10::Error that saving throws.
std::string save_failure(const StateDict& state, const fs::path& path) {
  try {
    save_weights(state, path);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST_F(SafetensorsTest, SavingWhereNothingCanBeWrittenNamesTheFile) {
  const auto nowhere = folder_ / "no/such/w.safetensors";
  EXPECT_TRUE(mentions(save_failure(StateDict(), nowhere), {nowhere.string(), "No such file"}));
  const auto below_a_file = file_ / "w.safetensors";
  write_bytes(file_, "old");
  EXPECT_TRUE(mentions(save_failure(StateDict(), below_a_file),
                       {below_a_file.string(), "Not a directory"}));
  const auto a_folder = folder_ / "folder.safetensors";
  fs::create_directory(a_folder);
  EXPECT_TRUE(mentions(save_failure(StateDict(), a_folder), {"regular file"}));
}

TEST_F(SafetensorsTest, AFullDiskLeavesTheOldFileWhole) {
  write_bytes(file_, "old");
  StateDict state;
  state.insert("w", torch::ones({1 << 16}));
  const auto child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {1 << 16, 1 << 16};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::_exit(save_failure(state, file_).find("File too large") != std::string::npos ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(read_bytes(file_), "old");
  EXPECT_EQ(folder_.entries(), 1U);
}

TEST_F(SafetensorsTest, PermissionsAndLinksAreKept) {
  const auto link = folder_ / "link.safetensors";
  fs::create_symlink("w.safetensors", link);
  save_weights(StateDict(), link);  // dangling so far
  EXPECT_TRUE(fs::is_symlink(link));
  ASSERT_TRUE(fs::is_regular_file(file_));
  fs::permissions(file_, fs::perms{0640});
  StateDict state;
  state.insert("w", torch::ones({2}));
  save_weights(state, link);
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_EQ(fs::status(file_).permissions(), fs::perms{0640});
  expect_bit_equal(load_weights(file_), state);
}

TEST_F(SafetensorsTest, KeyIsForCheckpointsOnly) {
  save_weights(StateDict(), file_);
  EXPECT_TRUE(mentions(value_error([&] { load_weights(file_, {.key = "model"}); }), {"key"}));
}

}  // namespace
}  // namespace attn::testing
