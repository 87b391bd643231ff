#include "attn/training.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/golden.h"
#include "support/golden_module.h"
#include "support/gradcheck.h"
#include "support/mentions.h"
#include "support/temporary_folder.h"

#include <attn/models/gpt.h>
#include <attn/weights.h>

#include <ATen/autocast_mode.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace attn::testing {
namespace {

namespace F = torch::nn::functional;

GPTOptions smaller() {
  return GPTOptions()
      .vocab_size(20)
      .context_length(8)
      .d_model(12)
      .num_heads(3)
      .num_layers(2)
      .dropout(0.0);
}

// The gradients of a seeded batch.
void differentiate(GPT& model, int64_t seed) {
  torch::manual_seed(static_cast<uint64_t>(seed));
  const auto ids = torch::randint(0, 20, {3, 9});
  for (auto& p : model->parameters()) p.mutable_grad().reset();
  const auto logits = model(ids.narrow(1, 0, 8));
  F::cross_entropy(logits.flatten(0, 1), ids.narrow(1, 1, 8).flatten()).backward();
}

void expect_same_parameters(const GPT& a, const GPT& b, Tolerance tolerance) {
  for (const auto& p : a->named_parameters()) {
    EXPECT_TRUE(all_close(p.value(), *b->named_parameters().find(p.key()), tolerance)) << p.key();
  }
}

StateDict cloned(const StateDict& state) {
  StateDict copy;
  for (const auto& item : state) copy.insert(item.key(), item.value().clone());
  return copy;
}

StateDict without(const StateDict& state, const std::string& key) {
  StateDict copy;
  for (const auto& item : state) {
    if (item.key() != key) copy.insert(item.key(), item.value());
  }
  return copy;
}

// ---- AdamW

TEST(AdamW, IsLibTorchsWithTwoGroups) {
  for (const auto dtype : {torch::kFloat32, torch::kFloat64}) {
    torch::manual_seed(0);
    GPT ours(smaller());
    ours->to(dtype);
    GPT theirs(std::dynamic_pointer_cast<GPTImpl>(ours->clone()));
    std::vector<torch::Tensor> decayed, others;
    for (auto& p : theirs->parameters()) (p.dim() >= 2 ? decayed : others).push_back(p);
    using torch::optim::AdamWOptions;
    const auto options = [](double decay) {
      return std::make_unique<AdamWOptions>(
          AdamWOptions(0.01).betas({0.8, 0.9}).eps(1e-6).weight_decay(decay));
    };
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(decayed, options(0.2));
    groups.emplace_back(others, options(0.0));
    torch::optim::AdamW reference(groups, AdamWOptions(0.01));
    AdamW optimizer(*ours,
                    {.lr = 0.01, .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-6, .weight_decay = 0.2});
    for (int64_t step = 0; step < 10; ++step) {
      differentiate(theirs, step);
      for (const auto& p : theirs->named_parameters()) {  // the same: rounding must not grow
        ours->named_parameters().find(p.key())->mutable_grad() = p.value().grad().clone();
      }
      reference.step();
      optimizer.step();
    }
    expect_same_parameters(
        ours, theirs, dtype == torch::kFloat32 ? Tolerance{1e-5, 1e-6} : Tolerance{1e-6, 1e-8});
  }
}

TEST(AdamW, DefaultsAreDocumented) {
  const GPT model(smaller());
  const AdamW optimizer(*model);
  EXPECT_EQ(optimizer.lr(), 3e-4);
  EXPECT_EQ(optimizer.options().beta1, 0.9);
  EXPECT_EQ(optimizer.options().beta2, 0.95);
  EXPECT_EQ(optimizer.options().eps, 1e-8);
  EXPECT_EQ(optimizer.options().weight_decay, 0.1);
}

// Without gradients' pull what moves is what decays.
TEST(AdamW, DecaysMatricesOnlyAndATiedWeightOnce) {
  torch::manual_seed(1);
  GPT model(smaller());
  const auto before = cloned(state_dict(*model));
  AdamW optimizer(*model, {.lr = 0.5, .weight_decay = 0.1});
  for (auto& p : model->parameters()) p.mutable_grad() = torch::zeros_like(p);
  optimizer.step();
  for (const auto& p : model->named_parameters()) {
    const double kept = p.value().dim() >= 2 ? 0.95 : 1.0;
    EXPECT_TRUE(all_close(p.value(), before[p.key()] * kept)) << p.key();
  }
  EXPECT_EQ(optimizer.state_dict().size(), 2 * model->parameters().size() + 1);
}

TEST(AdamW, TakesATensorRegisteredTwiceOnce) {
  const auto shared = torch::zeros({3, 3});
  torch::nn::Module both;
  both.register_parameter("a", shared);
  both.register_parameter("b", shared);
  both.register_parameter("frozen", torch::zeros({2}), /*requires_grad=*/false);
  const AdamW optimizer(both);
  EXPECT_EQ(optimizer.state_dict().keys(), (Keys{"exp_avg.a", "exp_avg_sq.a", "step"}));
}

TEST(AdamW, PassesOverWhatHasNoGradient) {
  torch::manual_seed(2);
  torch::nn::Linear model(3, 2);
  const auto weight = model->weight.detach().clone();
  AdamW optimizer(*model);
  optimizer.step();
  model->bias.mutable_grad() = torch::ones(2);
  optimizer.step();
  EXPECT_TRUE(all_equal(model->weight.detach(), weight));
  EXPECT_TRUE(all_equal(optimizer.state_dict()["step"], torch::tensor({0, 1}, torch::kLong)));
  optimizer.zero_grad();
  EXPECT_FALSE(model->bias.grad().defined());
}

TEST(AdamW, TakesGradientsOfOtherStrides) {
  torch::manual_seed(3);
  torch::nn::Linear model(3, 4), other(3, 4);
  load_state_dict(*other, state_dict(*model));
  const auto grad = torch::randn({3, 4});
  model->weight.mutable_grad() = grad.t();
  other->weight.mutable_grad() = grad.t().contiguous();
  AdamW(*model).step();
  AdamW(*other).step();
  EXPECT_TRUE(all_equal(model->weight.detach(), other->weight.detach()));
}

TEST(AdamW, GoesOnBitForBitAfterSavingAndLoading) {
  torch::manual_seed(4);
  GPT straight(smaller());
  GPT resumed(std::dynamic_pointer_cast<GPTImpl>(straight->clone()));
  AdamW optimizer(*straight, {.lr = 0.01});
  for (int64_t step = 0; step < 5; ++step) {
    differentiate(straight, step);
    optimizer.step();
  }
  const TemporaryFolder folder;
  {
    AdamW first(*resumed, {.lr = 0.01});
    for (int64_t step = 0; step < 3; ++step) {
      differentiate(resumed, step);
      first.step();
    }
    save_weights(first.state_dict(), folder / "optimizer.safetensors");
    save_weights(state_dict(*resumed), folder / "model.safetensors");
  }
  GPT fresh(smaller());
  load_state_dict(*fresh, load_weights(folder / "model.safetensors"));
  AdamW second(*fresh, {.lr = 0.01});
  second.load_state_dict(load_weights(folder / "optimizer.safetensors"));
  for (int64_t step = 3; step < 5; ++step) {
    differentiate(fresh, step);
    second.step();
  }
  expect_same_parameters(fresh, straight, {0, 0});
  const auto state = second.state_dict(), expected = optimizer.state_dict();
  for (const auto& item : expected) {
    EXPECT_TRUE(all_equal(state[item.key()], item.value())) << item.key();
  }
}

TEST(AdamW, LoadsAllOrNothing) {
  torch::nn::Linear model(3, 2);
  AdamW optimizer(*model);
  for (auto& p : model->parameters()) p.mutable_grad() = torch::ones_like(p);
  optimizer.step();
  const auto before = cloned(optimizer.state_dict());
  auto bad = cloned(without(without(before, "exp_avg.bias"), "exp_avg_sq.weight"));
  bad["exp_avg.weight"].zero_();
  bad["step"].fill_(-1);
  bad.insert("exp_avg_sq.weight", torch::zeros({2}));
  bad.insert("more", torch::zeros(1));
  EXPECT_TRUE(mentions(value_error([&] { optimizer.load_state_dict(bad); }),
                       {"exp_avg.bias", "more", "exp_avg_sq.weight: must be Float [2, 3], got",
                        "step: must be at least 0, got -1"}));
  const auto after = optimizer.state_dict();
  for (const auto& item : before) EXPECT_TRUE(all_equal(after[item.key()], item.value()));
  auto wide = without(before, "step");
  wide.insert("step", torch::ones({2}));
  EXPECT_TRUE(mentions(value_error([&] { optimizer.load_state_dict(wide); }),
                       {"step: must be Long [2], got Float [2]"}));
  auto undefined = without(before, "step");
  undefined.insert("step", torch::Tensor());
  EXPECT_TRUE(mentions(value_error([&] { optimizer.load_state_dict(undefined); }), {"step"}));
}

TEST(AdamW, RejectsWhatDoesNotFit) {
  torch::nn::Linear model(3, 2);
  const double nan = std::nan("");
  const auto refused = [&](const AdamWOptions& options, const char* name) {
    EXPECT_TRUE(mentions(value_error([&] { AdamW(*model, options); }), {name, "got"}));
  };
  refused({.lr = -1.0}, "lr");
  refused({.lr = nan}, "lr");
  refused({.beta1 = 1.0}, "beta1");
  refused({.beta2 = -0.1}, "beta2");
  refused({.beta2 = nan}, "beta2");
  refused({.eps = -1.0}, "eps");
  refused({.weight_decay = -0.1}, "weight_decay");
  AdamW optimizer(*model);
  EXPECT_TRUE(mentions(value_error([&] { optimizer.set_lr(nan); }), {"lr"}));
  optimizer.set_lr(0.25);
  EXPECT_EQ(optimizer.lr(), 0.25);

  EXPECT_TRUE(mentions(value_error([] {
                         const torch::nn::Module none;
                         const AdamW without_parameters(none);
                       }),
                       {"requires a gradient"}));
  torch::nn::Module strided;
  strided.register_parameter("wide", torch::zeros({1}).expand({4}));
  EXPECT_TRUE(mentions(value_error([&] { AdamW{strided}; }), {"wide", "dense"}));
  model->to(torch::kFloat64);
  model->bias.mutable_grad() = torch::ones(2, torch::kFloat64);
  EXPECT_TRUE(mentions(value_error([&] { optimizer.step(); }), {"bias must stay Float on cpu"}));

  torch::nn::Module embedding;
  auto table = embedding.register_parameter("table", torch::zeros({4, 2}));
  AdamW sparse(embedding);
  table.mutable_grad() = torch::zeros({4, 2}).to_sparse();
  EXPECT_TRUE(mentions(value_error([&] { sparse.step(); }), {"table", "dense"}));
}

// ---- clip_grad_norm

TEST(ClipGradNorm, IsLibTorchs) {
  for (const double max_norm : {0.0, 0.1, 1.0, 1e6, std::numeric_limits<double>::infinity()}) {
    torch::manual_seed(5);
    GPT ours(smaller());
    GPT theirs(std::dynamic_pointer_cast<GPTImpl>(ours->clone()));
    differentiate(ours, 7);
    differentiate(theirs, 7);
    ours->pos_embed->weight.mutable_grad().reset();
    theirs->pos_embed->weight.mutable_grad().reset();
    const double expected = torch::nn::utils::clip_grad_norm_(theirs->parameters(), max_norm);
    EXPECT_NEAR(clip_grad_norm(ours->parameters(), max_norm), expected, 1e-6 * expected);
    for (const auto& p : theirs->named_parameters()) {
      const auto& grad = ours->named_parameters().find(p.key())->grad();
      ASSERT_EQ(grad.defined(), p.value().grad().defined()) << p.key();
      if (!grad.defined()) continue;
      EXPECT_TRUE(all_close(grad, p.value().grad())) << p.key();
    }
  }
}

TEST(ClipGradNorm, MixesDtypesAndTakesATensorOnce) {
  auto a = torch::zeros(2, torch::kFloat64).requires_grad_();
  auto b = torch::zeros(1, torch::kBFloat16).requires_grad_();
  a.mutable_grad() = torch::tensor({3.0, 4.0}, torch::kFloat64);
  b.mutable_grad() = torch::full({1}, 12.0, torch::kBFloat16);
  EXPECT_NEAR(clip_grad_norm({a, b, a, torch::Tensor()}, 6.5), 13.0, 1e-12);
  EXPECT_TRUE(all_close(a.grad(), torch::tensor({1.5, 2.0}, torch::kFloat64), {1e-6, 0}));
  EXPECT_EQ(b.grad().item<float>(), 6.0F);
}

TEST(ClipGradNorm, TellsOfGradientsThatAreNotFinite) {
  auto a = torch::zeros(2).requires_grad_();
  EXPECT_EQ(clip_grad_norm({a}, 1.0), 0.0);
  EXPECT_EQ(clip_grad_norm({}, 1.0), 0.0);
  a.mutable_grad() = torch::tensor({1.0F, std::numeric_limits<float>::infinity()});
  EXPECT_FALSE(std::isfinite(clip_grad_norm({a}, 1.0)));
  EXPECT_TRUE(mentions(value_error([&] { clip_grad_norm({a}, -1.0); }), {"max_norm", "-1"}));
  EXPECT_TRUE(mentions(value_error([&] { clip_grad_norm({a}, std::nan("")); }), {"max_norm"}));
}

// ---- WarmupCosine

TEST(WarmupCosine, FollowsItsFormula) {
  const WarmupCosine schedule{.peak = 2.0, .least = 0.5, .warmup_steps = 4, .total_steps = 12};
  for (int64_t s = 0; s < 20; ++s) {
    const double expected =
        s < 4    ? 2.0 * static_cast<double>(s + 1) / 4.0
        : s < 12 ? 0.5 + 0.75 * (1 + std::cos(std::numbers::pi * static_cast<double>(s - 4) / 8))
                 : 0.5;
    EXPECT_DOUBLE_EQ(schedule.at(s), expected) << s;
  }
  EXPECT_EQ(schedule.at(3), 2.0);
  EXPECT_EQ(schedule.at(4), 2.0);
  EXPECT_DOUBLE_EQ(schedule.at(8), 1.25);
  EXPECT_EQ((WarmupCosine{1.0, 0.0, 0, 10}.at(0)), 1.0);  // no warm-up
  EXPECT_EQ((WarmupCosine{1.0, 0.1, 3, 3}.at(2)), 1.0);   // nothing else
  EXPECT_EQ((WarmupCosine{1.0, 0.1, 3, 3}.at(3)), 0.1);
  EXPECT_EQ((WarmupCosine{1.0, 0.1, 0, 0}.at(0)), 0.1);
}

TEST(WarmupCosine, RejectsWhatDoesNotFit) {
  const auto refused = [](const WarmupCosine& schedule, int64_t step, const char* name) {
    EXPECT_TRUE(mentions(value_error([&] { schedule.at(step); }), {name, "got"}));
  };
  refused({1.0, 0.1, 1, 4}, -1, "step");
  refused({1.0, 0.1, 5, 4}, 0, "warmup_steps");
  refused({1.0, 0.1, -1, 4}, 0, "warmup_steps");
  refused({0.1, 1.0, 1, 4}, 0, "least <= peak");
  refused({1.0, -0.1, 1, 4}, 0, "least <= peak");
  refused({std::nan(""), 0.1, 1, 4}, 0, "least <= peak");
}

// ---- chunked_cross_entropy

struct Problem {
  torch::Tensor hidden, weight, bias, targets;
};

Problem random_problem(int64_t N, int64_t V, torch::Dtype dtype, bool with_bias) {
  const auto leaf = [&](at::IntArrayRef sizes) {
    return torch::randn(sizes).to(dtype).requires_grad_();
  };
  const int64_t C = 6;
  return {leaf({N, C}), leaf({V, C}), with_bias ? leaf({V}) : torch::Tensor(),
          torch::randint(0, V, {N})};
}

std::vector<torch::Tensor> leaves_of(const Problem& p) {
  std::vector<torch::Tensor> leaves = {p.hidden, p.weight};
  if (p.bias.defined()) leaves.push_back(p.bias);
  return leaves;
}

TEST(ChunkedCrossEntropy, IsTheWholeLogits) {
  torch::manual_seed(6);
  for (const auto dtype : {torch::kFloat32, torch::kFloat64, torch::kBFloat16}) {
    // bfloat16: each of the two rounds its logits and their gradient, 2^-8 relative, elsewhere.
    const auto tolerance =
        dtype == torch::kBFloat16 ? Tolerance{2e-2, 1e-2} : default_tolerance(dtype);
    for (const int64_t N : {1, 7, 32}) {
      for (const int64_t V : {1, 5, 50}) {
        for (const int64_t chunk : {0, 1, 3, 32, 100}) {
          for (const bool with_bias : {false, true}) {
            const auto p = random_problem(N, V, dtype, with_bias);
            const auto loss = chunked_cross_entropy(p.hidden, p.weight, p.targets, p.bias, chunk);
            const auto wide = dtype == torch::kFloat64 ? torch::kFloat64 : torch::kFloat32;
            const auto logits = at::linear(p.hidden, p.weight, p.bias).to(wide);
            const auto expected = F::cross_entropy(logits, p.targets);
            SCOPED_TRACE(::testing::Message()
                         << dtype << " N " << N << " V " << V << " chunk " << chunk);
            EXPECT_TRUE(all_close(loss, expected));
            const auto leaves = leaves_of(p);
            const auto actual = torch::autograd::grad({3.0 * loss}, leaves);
            const auto grads = torch::autograd::grad({3.0 * expected}, leaves);
            for (size_t i = 0; i < leaves.size(); ++i)
              EXPECT_TRUE(all_close(actual[i], grads[i], tolerance)) << i;
          }
        }
      }
    }
  }
}

TEST(ChunkedCrossEntropy, GradientsAreFiniteDifferences) {
  torch::manual_seed(7);
  const auto targets = torch::randint(0, 9, {7});
  const auto f64 = torch::kFloat64;
  EXPECT_TRUE(gradcheck(
      [&](const Tensors& x) { return chunked_cross_entropy(x[0], x[1], targets, x[2], 3); },
      {torch::randn({7, 4}, f64), torch::randn({9, 4}, f64), torch::randn({9}, f64)}));
}

TEST(ChunkedCrossEntropy, GivesOnlyTheWantedGradients) {
  torch::manual_seed(8);
  for (int wanted = 0; wanted < 8; ++wanted) {
    auto p = random_problem(5, 11, torch::kFloat32, true);
    const auto expected =
        torch::autograd::grad({chunked_cross_entropy(p.hidden, p.weight, p.targets, p.bias, 2)},
                              {p.hidden, p.weight, p.bias});
    const std::vector<torch::Tensor> leaves = {p.hidden, p.weight, p.bias};
    for (int i = 0; i < 3; ++i) leaves[i].detach_().requires_grad_((wanted >> i & 1) != 0);
    const auto loss = chunked_cross_entropy(p.hidden, p.weight, p.targets, p.bias, 2);
    EXPECT_EQ(loss.requires_grad(), wanted != 0);
    if (wanted != 0) loss.backward();
    for (int i = 0; i < 3; ++i) {
      ASSERT_EQ(leaves[i].grad().defined(), (wanted >> i & 1) != 0);
      if (!leaves[i].grad().defined()) continue;
      EXPECT_TRUE(all_equal(leaves[i].grad(), expected[i]));
    }
  }
  const torch::NoGradGuard no_grad;
  const auto p = random_problem(5, 11, torch::kFloat32, true);
  EXPECT_FALSE(chunked_cross_entropy(p.hidden, p.weight, p.targets).requires_grad());
}

TEST(ChunkedCrossEntropy, TrainsATiedWeightFromBothEnds) {
  torch::manual_seed(9);
  GPT model(smaller());
  const auto ids = torch::randint(0, 20, {3, 9});
  const auto targets = ids.narrow(1, 1, 8).flatten();
  const auto whole = F::cross_entropy(model(ids.narrow(1, 0, 8)).flatten(0, 1), targets);
  const auto expected = torch::autograd::grad({whole}, model->parameters());
  const auto loss =
      chunked_cross_entropy(model->forward_features(ids.narrow(1, 0, 8)).flatten(0, 1),
                            model->head_weight(), targets, {}, 5);
  EXPECT_TRUE(all_close(loss, whole));
  // Twice through a kept graph: what is saved must not change.
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  const auto parameters = model->parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    EXPECT_TRUE(all_close(parameters[i].grad(), 2.0 * expected[i])) << i;
}

// Chunks of one row: a bfloat16 sum of so many small parts would stand still.
TEST(ChunkedCrossEntropy, SumsLowPrecisionInFloat32) {
  torch::manual_seed(10);
  const auto p = random_problem(512, 3, torch::kBFloat16, true);
  const auto leaves = leaves_of(p);
  const auto actual = torch::autograd::grad(
      {chunked_cross_entropy(p.hidden, p.weight, p.targets, p.bias, 1)}, leaves);
  const auto logits = at::linear(p.hidden.to(torch::kFloat64), p.weight.to(torch::kFloat64),
                                 p.bias.to(torch::kFloat64));
  const auto exact = torch::autograd::grad({F::cross_entropy(logits, p.targets)}, leaves);
  // One rounding of the result, 2^-9, and those of logits and their gradient, which average out.
  for (size_t i = 0; i < leaves.size(); ++i)
    EXPECT_TRUE(all_close(actual[i], exact[i], {2e-2, 5e-4})) << i;
}

// What this thread holds of the CPU allocator's memory at most, in bytes.
class PeakMemory : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t change, size_t, size_t, c10::Device) override {
    now_ += change;
    peak = std::max(peak, now_);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t peak = 0;

 private:
  int64_t now_ = 0;
};

template <typename Call>
int64_t peak_memory(Call&& call) {
  const auto memory = std::make_shared<PeakMemory>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory);
  call();
  return memory->peak;
}

TEST(ChunkedCrossEntropy, NeverHoldsAllLogits) {
  torch::manual_seed(13);
  const auto p = random_problem(1024, 8192, torch::kFloat32, true);
  const int64_t whole = 4 * 1024 * 8192, gradients = 4 * (1024 * 6 + 8192 * 7);
  const auto step = [&](int64_t chunk) {
    return peak_memory(
        [&] { chunked_cross_entropy(p.hidden, p.weight, p.targets, p.bias, chunk).backward(); });
  };
  // Logits and their logarithmic softmax, the gradients, and as much again for what is small.
  EXPECT_LE(step(64), 2 * whole / 16 + 2 * gradients);
  EXPECT_GE(step(1024), whole);  // the measure sees them

  const torch::NoGradGuard no_grad;
  const auto wide = random_problem(2048, 32768, torch::kFloat32, false);  // 256 MB
  EXPECT_LE(peak_memory([&] { chunked_cross_entropy(wide.hidden, wide.weight, wide.targets); }),
            (int64_t{2 * 64} << 20) + (1 << 20));
}

TEST(ChunkedCrossEntropy, FollowsAutocast) {
  torch::manual_seed(11);
  const auto p = random_problem(9, 14, torch::kFloat32, true);
  const auto half = [](const torch::Tensor& x) { return x.to(torch::kBFloat16); };
  const auto expected =
      chunked_cross_entropy(half(p.hidden), half(p.weight), p.targets, half(p.bias), 4);
  const auto expected_grads = torch::autograd::grad({expected}, leaves_of(p));
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::increment_nesting();
  const auto loss = chunked_cross_entropy(p.hidden, p.weight, p.targets, p.bias, 4);
  at::autocast::decrement_nesting();
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_TRUE(all_equal(loss, expected));
  const auto grads = torch::autograd::grad({loss}, leaves_of(p));
  for (size_t i = 0; i < grads.size(); ++i) {
    EXPECT_EQ(grads[i].scalar_type(), torch::kFloat32);
    EXPECT_TRUE(all_equal(grads[i], expected_grads[i]));
  }
}

TEST(ChunkedCrossEntropy, RefusesSecondDerivatives) {
  torch::manual_seed(12);
  const auto p = random_problem(5, 11, torch::kFloat32, false);
  const auto loss = chunked_cross_entropy(p.hidden, p.weight, p.targets);
  const auto grads = torch::autograd::grad({loss}, leaves_of(p), {}, /*retain_graph=*/true,
                                           /*create_graph=*/true);
  for (const auto& grad : grads) {
    ASSERT_TRUE(grad.requires_grad());
    try {
      grad.sum().backward({}, /*retain_graph=*/true);
      ADD_FAILURE() << "expected an error";
    } catch (const std::exception& error) {
      EXPECT_TRUE(mentions(error.what(), {"chunked_cross_entropy has no second derivatives"}));
    }
  }
}

TEST(ChunkedCrossEntropy, RejectsWhatDoesNotFit) {
  const auto h = torch::zeros({4, 6}), w = torch::zeros({5, 6}), b = torch::zeros(5),
             t = torch::zeros({4}, torch::kLong);
  const auto refused = [](const torch::Tensor& hidden, const torch::Tensor& weight,
                          const torch::Tensor& targets, const torch::Tensor& bias, int64_t chunk,
                          std::initializer_list<std::string> parts) {
    EXPECT_TRUE(mentions(
        value_error([&] { chunked_cross_entropy(hidden, weight, targets, bias, chunk); }), parts));
  };
  refused({}, w, t, {}, 0, {"hidden", "undefined"});
  refused(torch::zeros({2, 2, 6}), w, t, {}, 0, {"hidden", "[2, 2, 6]"});
  refused(h.to(torch::kLong), w, t, {}, 0, {"hidden", "Long"});
  refused(h, {}, t, {}, 0, {"weight", "undefined"});
  refused(h, torch::zeros({5, 7}), t, {}, 0, {"weight must be [V, 6]", "[5, 7]"});
  refused(h, w.to(torch::kFloat64), t, {}, 0, {"weight", "dtype Float, got Double"});
  refused(h, w.to(torch::kMeta), t, {}, 0, {"weight", "device cpu, got meta"});
  refused(h.narrow(0, 0, 0), w, t.narrow(0, 0, 0), {}, 0, {"at least 1 row, got 0"});
  refused(h, w.narrow(0, 0, 0), t, {}, 0, {"at least 1 row, got 4 and 0"});
  refused(h, w, {}, {}, 0, {"targets", "undefined"});
  refused(h, w, t.to(torch::kInt), {}, 0, {"targets must be int64 [4], got Int [4]"});
  refused(h, w, torch::zeros({3}, torch::kLong), {}, 0, {"targets must be int64 [4]", "[3]"});
  refused(h, w, torch::full({4}, 5), {}, 0, {"targets must be in [0, 5), got 5"});
  refused(h, w, torch::full({4}, -100), {}, 0, {"targets must be in [0, 5), got -100"});
  refused(h, w, t.to(torch::kMeta), {}, 0, {"targets", "device cpu, got meta"});
  refused(h, w, t, torch::zeros(6), 0, {"bias must be [5], got [6]"});
  refused(h, w, t, b.to(torch::kFloat64), 0, {"bias", "dtype Float, got Double"});
  refused(h, w, t, {}, -1, {"chunk", "-1"});
}

// ---- All of it: Python's training

// A key's bias shifts all scores of a row alike: its true gradient is 0, and in float32 Adam scales
// what rounding leaves of it to whole steps of lr.
torch::Tensor without_key_bias(const std::string& name, const torch::Tensor& x) {
  if (!name.ends_with("attn.qkv.bias")) return x;
  const auto parts = x.detach().chunk(3);
  return torch::cat({parts[0], parts[2]});
}

TEST(Training, TenStepsArePythons) {
  const auto start = load_golden("gpt_tiny"), golden = load_golden("training");
  const auto trained = golden.with_prefix("trained.");
  for (const auto dtype : {torch::kFloat64, torch::kFloat32}) {
    SCOPED_TRACE(dtype);
    GPT model(GPTOptions()
                  .vocab_size(512)
                  .context_length(64)
                  .d_model(64)
                  .num_heads(4)
                  .num_layers(2)
                  .dropout(0.0));
    set_parameters(*model, start.with_prefix("weight."));
    model->to(dtype);
    AdamW optimizer(*model);
    const WarmupCosine schedule{.peak = 1e-2, .least = 1e-3, .warmup_steps = 3, .total_steps = 10};
    std::vector<double> losses, norms, rates;
    for (int64_t step = 0; step < 10; ++step) {
      const auto batch = golden["batches"][step];                      // [B, T + 1]
      const auto h = model->forward_features(batch.narrow(1, 0, 16));  // [B, T, C]
      const auto loss = chunked_cross_entropy(h.flatten(0, 1), model->head_weight(),
                                              batch.narrow(1, 1, 16).flatten(), {}, 24);
      optimizer.zero_grad();
      loss.backward();
      norms.push_back(clip_grad_norm(model->parameters(), 1.0));
      rates.push_back(schedule.at(step));
      optimizer.set_lr(rates.back());
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
    const auto list = [](const std::vector<double>& x) {
      return torch::tensor(x, torch::kFloat64);
    };
    EXPECT_TRUE(all_close(list(rates), golden["learning_rates"], {1e-14, 0}));
    EXPECT_TRUE(all_close(list(losses), golden["losses"], {1e-5, 0}));
    EXPECT_TRUE(all_close(list(norms), golden["gradient_norms"], {1e-5, 0}));
    for (const auto& p : model->named_parameters()) {
      const auto actual = without_key_bias(p.key(), p.value()).to(torch::kFloat64);
      const auto expected = without_key_bias(p.key(), trained.at(p.key())).to(torch::kFloat64);
      const double error = ((actual - expected).norm() / expected.norm()).item<double>();
      // Python's own float32 is up to 2e-5 from its float64 here, by instruction set.
      EXPECT_LE(error, dtype == torch::kFloat64 ? 1e-6 : 1e-4) << p.key();
      // The file's float32 is all that float64 may differ by.
      if (dtype != torch::kFloat64) continue;
      EXPECT_TRUE(all_close(actual, expected, {1e-6, 1e-9})) << p.key();
    }
  }
}

}  // namespace
}  // namespace attn::testing
