#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/mentions.h"
#include "support/temporary_folder.h"

#include <attn/models/gpt.h>
#include <attn/weights.h>

#include <caffe2/serialize/inline_container.h>
#include <torch/serialize.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace attn::testing {
namespace {

namespace fs = std::filesystem;

/// A pickle's opcodes, strung together.
namespace op {
std::string text(const std::string& value) {
  return std::string("X") + static_cast<char>(value.size()) + std::string(3, '\0') + value;
}
std::string number(uint8_t value) {
  return std::string("K") + static_cast<char>(value);
}
std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
std::string tuple(const std::string& items) {
  return "(" + items + "t";
}
std::string storage(const std::string& key, const std::string& type = "FloatStorage") {
  return tuple(text("storage") + global("torch", type) + text(key) + text("cpu") + number(4)) + "Q";
}
std::string tensor(const std::string& storage_, const std::string& offset, const std::string& sizes,
                   const std::string& strides) {
  return global("torch._utils", "_rebuild_tensor_v2") +
         tuple(storage_ + offset + tuple(sizes) + tuple(strides) + "\x89" +
               global("collections", "OrderedDict") + ")R") +
         "R";
}
std::string dict(const std::string& items) {
  return "}(" + items + "u";
}
std::string pickle(const std::string& value) {
  return "\x80\x02" + value + ".";
}
}  // namespace op

class PytorchFile : public ::testing::Test {
 protected:
  using Records = std::vector<std::pair<std::string, std::string>>;

  /// A container as torch.save makes it.
  fs::path write(const Records& records) {
    const auto path = folder_ / "file.pt";
    caffe2::serialize::PyTorchStreamWriter writer(path.string());
    for (const auto& [name, bytes] : records) writer.writeRecord(name, bytes.data(), bytes.size());
    writer.writeEndOfFile();
    return path;
  }
  fs::path write_pickle(const std::string& value) {
    return write({{"data.pkl", op::pickle(value)}, {"data/0", std::string(16, '\0')}});
  }
  std::string refusal(const fs::path& path, const LoadWeightsOptions& options = {}) {
    return value_error([&] { load_weights(path, options); });
  }
  std::string refusal_of(const std::string& value) { return refusal(write_pickle(value)); }

  TemporaryFolder folder_;
};

StateDict all_kinds() {
  torch::manual_seed(3);
  StateDict state;
  for (const auto dtype :
       {torch::kFloat32, torch::kFloat16, torch::kBFloat16, torch::kFloat64, torch::kInt64,
        torch::kInt32, torch::kInt16, torch::kInt8, torch::kUInt8, torch::kBool})
    state.insert(std::string(c10::toString(dtype)), (torch::randn({2, 3}) * 3).to(dtype));
  state.insert("empty", torch::empty({0, 4}));
  state.insert("scalar", torch::tensor(2.5));
  state.insert("transposed", torch::randn({3, 4}).t());
  state.insert("Größe \u6ce8\u610f", torch::ones({1}));
  const auto shared = torch::arange(10, torch::kFloat32);
  state.insert("shared.all", shared);
  state.insert("shared.part", shared.slice(0, 2, 10, 2));
  return state;
}

TEST_F(PytorchFile, RoundTripsEveryKindWithStridesAndSharing) {
  const auto expected = all_kinds();
  for (const auto* name : {"a.pt", "a.pth", "a.bin"}) {
    save_weights(expected, folder_ / name);
    const auto actual = load_weights(folder_ / name);
    ASSERT_EQ(actual.keys(), expected.keys());
    for (const auto& item : expected) {
      const auto& tensor = actual[item.key()];
      EXPECT_TRUE(all_equal(tensor, item.value())) << item.key();
      EXPECT_EQ(tensor.strides(), item.value().strides()) << item.key();
    }
    EXPECT_TRUE(actual["shared.part"].is_alias_of(actual["shared.all"]));
  }
}

TEST_F(PytorchFile, TiedModelsStayTiedAndTheFileIsNotWritten) {
  torch::manual_seed(1);
  const auto options =
      GPTOptions().vocab_size(20).context_length(8).d_model(12).num_heads(3).num_layers(1);
  GPT model(options), other(options);
  const auto path = folder_ / "gpt.pt";
  save_weights(state_dict(*model), path);
  const auto before = read_bytes(path);
  auto state = load_weights(path);
  EXPECT_TRUE(state["lm_head.weight"].is_alias_of(state["tok_embed.weight"]));
  load_state_dict(*other, state);
  EXPECT_TRUE(all_equal(other->tok_embed->weight.detach(), model->tok_embed->weight.detach()));
  state["tok_embed.weight"].fill_(1.0);  // the map is private
  EXPECT_EQ(read_bytes(path), before);

  // safetensors holds one copy and says so; loading shows both names again.
  save_weights(state_dict(*model), folder_ / "gpt.safetensors");
  EXPECT_LT(fs::file_size(folder_ / "gpt.safetensors"), fs::file_size(path));
  GPT third(options);
  load_state_dict(*third, load_weights(folder_ / "gpt.safetensors"));
  EXPECT_TRUE(all_equal(third->tok_embed->weight.detach(), model->tok_embed->weight.detach()));
}

TEST_F(PytorchFile, FindsTheStateDictOfACheckpoint) {
  const auto tensor = op::tensor(op::storage("0"), op::number(0), op::number(4), op::number(1));
  const auto state = op::dict(op::text("w") + tensor);
  const auto one =
      write_pickle(op::dict(op::text("epoch") + op::number(3) + op::text("model") + state));
  EXPECT_EQ(load_weights(one)["w"].numel(), 4);
  EXPECT_EQ(load_weights(one, {.key = "model"})["w"].numel(), 4);
  EXPECT_TRUE(mentions(refusal(one, {.key = "weights"}), {"model", "epoch", "weights"}));
  EXPECT_TRUE(mentions(refusal(one, {.key = "epoch"}), {"epoch", "3"}));
  const auto two = write_pickle(op::dict(op::text("model") + state + op::text("ema") + state));
  EXPECT_TRUE(mentions(refusal(two), {"several", "model", "ema"}));
  EXPECT_EQ(load_weights(two, {.key = "ema"})["w"].numel(), 4);
}

TEST_F(PytorchFile, RefusesWhateverWouldRun) {
  const auto call = [](const std::string& module, const std::string& name) {
    return op::global(module, name) + op::tuple(op::text("touch /tmp/never")) + "R";
  };
  EXPECT_TRUE(mentions(refusal_of(call("posix", "system")), {"posix.system", "not run"}));
  EXPECT_TRUE(mentions(refusal_of(call("os", "system")), {"os.system"}));
  EXPECT_TRUE(mentions(refusal_of(call("builtins", "eval")), {"builtins.eval"}));
  EXPECT_TRUE(mentions(refusal_of(call("__builtin__", "exec")), {"builtins.exec"}));
  EXPECT_TRUE(mentions(refusal_of(call("torch", "load")), {"torch.load"}));
  EXPECT_TRUE(mentions(refusal_of(call("__main__", "Model")), {"__main__.Model", "state_dict()"}));
  // By a name from the stack; by a dtype's name; by opcodes that make objects.
  EXPECT_TRUE(
      mentions(refusal_of(op::text("posix") + op::text("system") + "\x93"), {"posix.system"}));
  EXPECT_TRUE(mentions(refusal_of(op::global("torch", "float32") + ")R"), {"torch.float32"}));
  for (const std::string code : {"i", "o", "\x81", "\x92", "P", "\x82", "\x97"})
    EXPECT_TRUE(mentions(refusal_of(op::global("torch", "Size") + ")" + code), {"opcode"})) << code;
}

TEST_F(PytorchFile, RefusesTensorsBeyondTheirStorage) {
  const auto refused = [&](const std::string& offset, const std::string& sizes,
                           const std::string& strides, const std::string& key = "0") {
    return refusal_of(
        op::dict(op::text("w") + op::tensor(op::storage(key), offset, sizes, strides)));
  };
  const auto n = [](uint8_t value) { return op::number(value); };
  const std::string huge = "\x8a\x08" + std::string(7, '\xff') + "\x7f";
  const std::string minus = std::string("J") + std::string(4, '\xff');
  EXPECT_TRUE(mentions(refused(n(0), n(5), n(1)), {"storage of 4", "[5]"}));
  EXPECT_TRUE(mentions(refused(n(1), n(4), n(1)), {"storage of 4"}));
  EXPECT_TRUE(mentions(refused(n(0), n(2), n(4)), {"storage of 4"}));
  EXPECT_TRUE(mentions(refused(minus, n(1), n(1)), {"offset", "-1"}));
  EXPECT_TRUE(mentions(refused(n(0), minus, n(1)), {"-1"}));
  EXPECT_TRUE(mentions(refused(n(0), n(2), minus), {"-1"}));
  EXPECT_TRUE(mentions(refused(huge, n(1), n(1)), {"storage of 4"}));
  EXPECT_TRUE(mentions(refused(n(0), huge + huge, n(0) + n(0)), {"storage of 4"}));
  EXPECT_TRUE(mentions(refused(n(0), n(2) + n(2), n(1)), {"stride"}));
  EXPECT_TRUE(mentions(refused(n(0), n(1), n(1), "1"), {"no record 1"}));
  EXPECT_TRUE(mentions(refused(n(0), n(1), n(1), "../0"), {"number its storages"}));
}

TEST_F(PytorchFile, RefusesDamagedPickles) {
  const auto tensor = op::tensor(op::storage("0"), op::number(0), op::number(4), op::number(1));
  const auto whole = op::pickle(op::dict(op::text("w") + tensor));
  for (size_t size = 0; size < whole.size(); ++size) {
    const auto path =
        write({{"data.pkl", whole.substr(0, size)}, {"data/0", std::string(16, '\0')}});
    EXPECT_THROW(load_weights(path), c10::ValueError) << size;
  }
  EXPECT_TRUE(mentions(refusal_of(op::number(3)), {"state_dict", "3"}));
  EXPECT_TRUE(mentions(refusal_of(op::dict(op::text("w") + op::number(1))), {"tensors", "\"w\""}));
  EXPECT_TRUE(mentions(refusal_of(op::dict(op::text("w") + tensor + op::text("w") + tensor)),
                       {"once", "\"w\""}));
  EXPECT_TRUE(mentions(refusal_of("("), {"stack"}));
  EXPECT_TRUE(mentions(refusal_of("h\x05"), {"memorised"}));
  EXPECT_TRUE(mentions(refusal_of(std::string("Nr") + std::string(4, '\x7f')), {"memo"}));
  EXPECT_TRUE(
      mentions(refusal_of(std::string("X") + std::string(4, '\xff') + "abc"), {"early end"}));
}

// Lists in lists, 100,000 deep and in a circle: neither reading nor forgetting them may recurse.
TEST_F(PytorchFile, NestingIsNoDanger) {
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "]";
  for (int i = 1; i < 100'000; ++i) deep += "a";
  EXPECT_TRUE(mentions(refusal_of(deep), {"a list"}));
  EXPECT_TRUE(mentions(refusal_of(std::string("]q\0h\0a", 6)), {"a list"}));
}

TEST_F(PytorchFile, EveryTruncationAndNoByteFlipCrashes) {
  save_weights(all_kinds(), folder_ / "whole.pt");
  const auto whole = read_bytes(folder_ / "whole.pt");
  for (size_t size = 0; size < whole.size();
       size += size < 64 || size + 1500 > whole.size() ? 1 : 37) {
    write_bytes(folder_ / "cut.pt", whole.substr(0, size));
    EXPECT_THROW(load_weights(folder_ / "cut.pt"), c10::ValueError) << size;
  }
  // Flips of what is no tensor data: either refused or read, in bounds.
  for (size_t at = 0; at < whole.size(); at += 3) {
    auto flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ 0x41);
    write_bytes(folder_ / "flipped.pt", flipped);
    try {
      for (const auto& item : load_weights(folder_ / "flipped.pt"))
        item.value().to(torch::kFloat64).sum().item<double>();
    } catch (const c10::ValueError&) {
    }
  }
}

TEST_F(PytorchFile, RefusesBombsAndOtherArchivesByName) {
  const auto path = folder_ / "deflated.pt";
  const std::string name = "a/data.pkl";
  // A stored-looking container whose directory says method 8.
  std::string local("PK\x03\x04\x14\0\0\0\x08\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\x40\x0a\0\0\0", 30);
  std::string central(
      "PK\x01\x02\x14\0\x14\0\0\0\x08\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\x40\x0a\0\0\0"
      "\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
      46);
  std::string bytes = local + name + "x";
  const auto offset = static_cast<char>(bytes.size());
  const auto size = static_cast<char>(central.size() + name.size());
  bytes += central + name;
  bytes += std::string("PK\x05\x06\0\0\0\0\x01\0\x01\0", 12) + size + std::string(3, '\0') +
           offset + std::string(5, '\0');
  write_bytes(path, bytes);
  EXPECT_TRUE(mentions(refusal(path), {"data.pkl", "compression method 8", "1073741824"}));

  torch::serialize::OutputArchive archive;
  archive.write("w", torch::ones({1}));
  archive.save_to((folder_ / "cpp.pt").string());
  EXPECT_TRUE(mentions(refusal(folder_ / "cpp.pt"), {"torch::save", "save_weights"}));
  write_bytes(folder_ / "old.pt", "\x80\x02\x8a\x0al");
  EXPECT_TRUE(mentions(refusal(folder_ / "old.pt"), {"1.6", "torch.save"}));
  EXPECT_TRUE(mentions(refusal(write({{"other", "x"}})), {"data.pkl"}));
  EXPECT_TRUE(mentions(refusal(folder_ / "none.pt"), {"none.pt", "No such file"}));
  EXPECT_TRUE(mentions(refusal(folder_.path()), {"model.safetensors"}));
}

TEST_F(PytorchFile, ReadsShardsByTheirIndexAndNoOtherFile) {
  StateDict a, b;
  a.insert("x", torch::ones({2}));
  b.insert("y", torch::zeros({3}));
  save_weights(a, folder_ / "model-1.safetensors");
  save_weights(b, folder_ / "pytorch_model-2.bin");
  const auto index = folder_ / "model.safetensors.index.json";
  const auto with = [&](const std::string& map) {
    write_bytes(index, R"({"metadata": {}, "weight_map": )" + map + "}");
    return index;
  };
  with(R"({"x": "model-1.safetensors", "y": "pytorch_model-2.bin"})");
  for (const auto& path : {index, folder_.path()}) {
    const auto state = load_weights(path);
    EXPECT_EQ(state.size(), 2);
    EXPECT_TRUE(all_equal(state["y"], torch::zeros({3})));
  }
  EXPECT_TRUE(mentions(refusal(with(R"({"x": "../model-1.safetensors"})")), {"beside the index"}));
  EXPECT_TRUE(mentions(refusal(with(R"({"x": "/etc/passwd"})")), {"beside the index"}));
  EXPECT_TRUE(mentions(refusal(with(R"({"z": "model-1.safetensors"})")), {"\"z\""}));
  EXPECT_TRUE(mentions(refusal(with(R"({"x": "gone.safetensors"})")), {"gone.safetensors"}));
  EXPECT_TRUE(mentions(refusal(with("[]")), {"weight_map"}));
}

TEST_F(PytorchFile, FailedSavesLeaveTheOldFile) {
  StateDict state;
  state.insert("x", torch::ones({2}));
  const auto path = folder_ / "a.pt";
  save_weights(state, path);
  const auto before = read_bytes(path);
  StateDict bad;
  bad.insert("x", torch::ones({2}).to(torch::kFloat8_e4m3fn));
  EXPECT_TRUE(mentions(value_error([&] { save_weights(bad, path); }), {"\"x\"", "dtype"}));
  EXPECT_TRUE(mentions(value_error([&] {
                         save_weights(state, path, {.metadata = {{"a", "b"}}});
                       }),
                       {"metadata"}));
  EXPECT_TRUE(mentions(value_error([&] { save_weights(state, folder_ / "a.npz"); }), {".npz"}));
  EXPECT_THROW(save_weights(state, folder_ / "no" / "a.pt"), c10::Error);
  EXPECT_EQ(read_bytes(path), before);
  EXPECT_EQ(folder_.entries(), 1);
}

}  // namespace
}  // namespace attn::testing
