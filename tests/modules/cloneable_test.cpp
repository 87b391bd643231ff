#include "attn/modules/cloneable.h"

#include "support/all_close.h"
#include "support/modules.h"

#include <attn/state_dict.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace attn::testing {
namespace {

using torch::nn::AnyModule;
using torch::nn::Module;

std::string print(const Module& module) {
  std::ostringstream out;
  out << module;
  return out.str();
}

/// Every other parameter, so that neighbours at every depth differ.
void freeze_every_other(Module& module) {
  bool freeze = true;
  for (auto& parameter : module.parameters()) {
    parameter.requires_grad_(!freeze);
    freeze = !freeze;
  }
}

void expect_same_requires_grad(const Module& actual, const Module& expected) {
  const auto found = actual.named_parameters();
  ASSERT_EQ(found.size(), expected.named_parameters().size());
  for (const auto& parameter : expected.named_parameters()) {
    EXPECT_EQ(found[parameter.key()].requires_grad(), parameter.value().requires_grad())
        << parameter.key();
  }
}

/// Dotted names of all tensors in an archive, sorted.
std::vector<std::string> archive_keys(torch::serialize::InputArchive& archive,
                                      const std::string& prefix = "") {
  std::vector<std::string> keys;
  for (const auto& key : archive.keys()) {
    torch::serialize::InputArchive child;
    if (archive.try_read(key, child)) {
      const auto below = archive_keys(child, prefix + key + ".");
      keys.insert(keys.end(), below.begin(), below.end());
    } else {
      keys.push_back(prefix + key);
    }
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

class AnyModuleOfOurs : public ::testing::TestWithParam<ModuleCase> {
 protected:
  static constexpr int64_t B = 2, T = 5;

  void SetUp() override { torch::manual_seed(7); }

  const ModuleCase& subject() const { return GetParam(); }
  AnyModule make(double dropout = 0.0) const { return subject().make({.dropout = dropout}); }
  torch::Tensor run(AnyModule& module, const torch::Tensor& x) const {
    return subject().run(module, x);
  }
  torch::Tensor input() const { return subject().random_input(B, T); }
};
INSTANTIATE_TEST_SUITE_P(Each, AnyModuleOfOurs, ::testing::ValuesIn(all_modules()), module_name);

/// All but the position table, which takes a length and learns nothing.
class AnyModuleOnTensors : public AnyModuleOfOurs {};
INSTANTIATE_TEST_SUITE_P(Each, AnyModuleOnTensors,
                         ::testing::ValuesIn(modules_where([](const auto& m) {
                           return m.input != Input::length;
                         })),
                         module_name);

TEST_P(AnyModuleOfOurs, ClonesToTheSameOutputOnStorageOfItsOwn) {
  const torch::NoGradGuard no_grad;  // small modules round differently when a gradient is wanted
  auto module = make();
  auto copy = module.clone();
  const auto x = input();
  const auto y = run(module, x);
  EXPECT_TRUE(torch::equal(run(copy, x), y));
  const auto parameters = copy.ptr()->named_parameters();
  for (const auto& parameter : module.ptr()->named_parameters()) {
    EXPECT_NE(parameters[parameter.key()].data_ptr(), parameter.value().data_ptr())
        << parameter.key();
  }
  for (auto& parameter : copy.ptr()->parameters()) parameter.add_(1.0);
  EXPECT_TRUE(torch::equal(run(module, x), y));
}

TEST_P(AnyModuleOfOurs, ClonesWithFrozenParametersFrozen) {
  const auto module = make();
  freeze_every_other(*module.ptr());
  expect_same_requires_grad(*module.clone().ptr(), *module.ptr());

  torch::nn::Sequential inner;
  inner->push_back(module);
  const torch::nn::Sequential outer(inner);
  expect_same_requires_grad(*outer->clone(), *outer);
}

TEST_P(AnyModuleOfOurs, ClonesKeepModeOptionsDtypeAndDropout) {
  auto module = make(0.25);
  module.ptr()->to(torch::kBFloat16);
  for (const bool training : {true, false}) {
    module.ptr()->train(training);
    auto copy = module.clone();
    const auto copies = copy.ptr()->modules();
    for (const auto& part : copies) EXPECT_EQ(part->is_training(), training) << part->name();
    EXPECT_EQ(print(*copy.ptr()), print(*module.ptr()));
    const auto x = subject().random_input(B, T, torch::kBFloat16);
    torch::manual_seed(3);
    const auto y = run(module, x);
    torch::manual_seed(3);
    EXPECT_TRUE(torch::equal(run(copy, x), y));
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
  }
}

TEST_P(AnyModuleOfOurs, ClonesKeepWhatWasChangedAfterConstruction) {
  auto module = make(0.25);
  for (const auto& part : module.ptr()->modules()) {
    if (auto* dropout = part->as<torch::nn::DropoutImpl>()) dropout->options.p(1.0);
  }
  auto copy = module.clone();
  for (const auto& part : copy.ptr()->modules()) {
    if (auto* dropout = part->as<torch::nn::DropoutImpl>()) {
      EXPECT_EQ(dropout->options.p(), 1.0);
    }
  }
  const auto x = input();
  EXPECT_TRUE(torch::equal(run(copy, x), run(module, x)));
}

TEST_P(AnyModuleOfOurs, ClonesWithoutDrawingFromTheGenerator) {
  const auto module = make();
  const auto generator = at::detail::getDefaultCPUGenerator();
  torch::randn({3});
  const auto state = generator.get_state();
  module.clone();
  EXPECT_TRUE(torch::equal(generator.get_state(), state));
}

TEST_P(AnyModuleOfOurs, ConvertsInAnyOrderAndAnswersInTheInputsDtype) {
  auto module = make();
  const auto x = input();
  const auto y = run(module, x);
  const auto output = [&](torch::Dtype dtype) {
    return run(module, x.is_floating_point() ? x.to(dtype) : x);
  };
  const auto& root = module.ptr();
  root->to(torch::kFloat64);
  EXPECT_EQ(output(torch::kFloat64).scalar_type(), torch::kFloat64);
  EXPECT_TRUE(all_close(output(torch::kFloat64).to(torch::kFloat32), y));
  root->to(torch::kCPU);
  EXPECT_EQ(output(torch::kFloat64).scalar_type(), torch::kFloat64);
  root->to(torch::kCPU, torch::kFloat32);  // nothing was lost on the way
  EXPECT_TRUE(torch::equal(output(torch::kFloat32), y));
  root->to(torch::kBFloat16);
  EXPECT_EQ(output(torch::kBFloat16).scalar_type(), torch::kBFloat16);
  root->to(torch::kFloat32);
  EXPECT_EQ(output(torch::kFloat32).scalar_type(), torch::kFloat32);
  EXPECT_TRUE(all_close(output(torch::kFloat32), y, {5e-2, 5e-2}));  // weights of 8 bits
}

TEST_P(AnyModuleOfOurs, SavesAndLoadsWithThePythonKeysOnly) {
  auto module = make();
  std::stringstream file;
  torch::save(module.ptr(), file);

  torch::serialize::InputArchive archive;
  archive.load_from(file);
  auto keys = state_dict(*module.ptr()).keys();
  if (const auto* tied = dynamic_cast<const TiedWeights*>(module.ptr().get())) {
    for (const auto& [alias, name] : tied->tied_weights()) std::erase(keys, alias);  // once only
  }
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(archive_keys(archive), keys);

  auto other = make();  // other draws
  const auto x = input();
  file.seekg(0);
  auto loaded = other.ptr();
  torch::load(loaded, file);
  EXPECT_TRUE(torch::equal(run(other, x), run(module, x)));
}

TEST_P(AnyModuleOnTensors, RunsInsideSequentialWithDefaultArguments) {
  auto module = make();
  const auto x = input();
  torch::nn::Sequential one;
  one->push_back(module);
  const auto y = run(module, x);
  EXPECT_TRUE(torch::equal(one->forward(x), y));
  if (subject().input == Input::ids) return;
  torch::nn::Sequential two;
  two->push_back(module);
  two->push_back(make());
  auto second = *(two->begin() + 1);
  EXPECT_TRUE(torch::equal(two->forward(x), run(second, y)));
}

TEST_P(AnyModuleOnTensors, FrozenParametersGetNoGradientAndTheOthersDo) {
  auto module = make();
  freeze_every_other(*module.ptr());
  module.ptr()->parameters().back().requires_grad_();
  run(module, input()).square().sum().backward();
  for (const auto& parameter : module.ptr()->named_parameters()) {
    EXPECT_EQ(parameter.value().grad().defined(), parameter.value().requires_grad())
        << parameter.key();
  }
}

TEST_P(AnyModuleOnTensors, AcceptsSingleTokensAndEmptyBatches) {
  auto module = make();
  const auto y = run(module, subject().random_input(B, 1));
  EXPECT_EQ(y.size(1), 1);
  EXPECT_TRUE(y.isfinite().all().item<bool>());
  auto shape = run(module, input()).sizes().vec();
  shape[0] = 0;
  EXPECT_EQ(run(module, subject().random_input(0, T)).sizes(), torch::IntArrayRef(shape));
}

TEST_P(AnyModuleOnTensors, AcceptsInputsOfAnyStrides) {
  auto module = make();
  const auto x = subject().random_input(2 * B, T);
  const auto transposed = x.transpose(0, 1).contiguous().transpose(0, 1);
  const auto stepped = x.slice(0, 0, 2 * B, 2);
  const auto expanded = x.narrow(0, 0, 1).expand_as(x);
  for (const auto& strided : {transposed, stepped, expanded}) {
    ASSERT_FALSE(strided.is_contiguous());
    EXPECT_TRUE(all_close(run(module, strided), run(module, strided.contiguous())));
  }
}

TEST_P(AnyModuleOfOurs, PrintsItsNameAndOptions) {
  const auto text = print(*make().ptr());
  const auto type = text.substr(0, text.find('('));
  EXPECT_TRUE(("attn::" + subject().name).starts_with(type) && type.size() > 6) << text;
  EXPECT_NE(text.find("=12"), std::string::npos) << text;  // the width, by name
}

TEST(Cloneable, PrintsEveryNumberByItsPythonName) {
  const auto first_line = [](const Module& module) {
    const auto text = print(module);
    return text.substr(0, text.find('\n'));
  };
  EXPECT_EQ(first_line(*SelfAttention(8, 2)),
            "attn::SelfAttention(n_embd=8, n_head=2, bias=false, causal=true)(");
  EXPECT_EQ(first_line(*MultiHeadSelfAttention(
                MultiHeadSelfAttentionOptions(16, 4, 5).attn_dropout(0.25).causal(false))),
            "attn::MultiHeadSelfAttention(d_model=16, n_heads=4, max_context_length=5, "
            "attn_dropout=0.25, out_dropout=0, causal=false)(");
}

TEST(Cloneable, ClonesPipelinesOfOurModulesWithPyTorchs) {
  torch::manual_seed(7);
  const auto options = block_options({});
  torch::nn::Sequential pipeline(TokenEmbedding(20, 12), TransformerBlock(options), LayerNorm(12),
                                 torch::nn::Linear(12, 20));
  freeze_every_other(*pipeline);
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(pipeline->clone());
  ASSERT_NE(copy, nullptr);
  const auto ids = torch::randint(0, 20, {2, 5});
  EXPECT_TRUE(torch::equal(copy->forward(ids), pipeline->forward(ids)));
  // PyTorch's own Linear forgets on its own, hence up to there.
  for (size_t i = 0; i < 3; ++i) expect_same_requires_grad(*copy->ptr(i), *pipeline->ptr(i));
}

// The position table and the causal mask are no part of an archive.
TEST(Cloneable, AnArchiveOfAShortContextLoadsIntoALongOne) {
  torch::manual_seed(7);
  for (const auto& subject : modules_where([](const auto& m) { return m.attends; })) {
    SCOPED_TRACE(subject.name);
    if (subject.name == "GPT") continue;  // its positions are weights
    auto short_one = subject.make({.context = 8});
    auto long_one = subject.make({.context = 16});
    std::stringstream file;
    torch::save(short_one.ptr(), file);
    auto root = long_one.ptr();
    torch::load(root, file);
    const auto x = subject.random_input(1, 16);
    const auto y = subject.run(long_one, x);
    EXPECT_TRUE(all_close(y.narrow(1, 0, 8), subject.run(short_one, x.narrow(1, 0, 8))));
    const auto last_changed = subject.run(long_one, subject.with_other_token(x, 15));
    EXPECT_TRUE(torch::equal(last_changed.narrow(1, 0, 15), y.narrow(1, 0, 15)));
  }
}

}  // namespace
}  // namespace attn::testing
