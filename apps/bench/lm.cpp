#include "attention_check.h"
#include "commands.h"
#include "serve.h"
#include "session.h"
#include "support/program.h"

#include <attn/models/tiny_attention_lm.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <c10/core/InferenceMode.h>
#include <torch/optim/adam.h>

#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <stdexcept>

namespace bench {
namespace {

// The second seed document's demo.
constexpr int64_t kVocabSize = 64, kWidth = 32, kHeads = 4, kTokens = 12, kBatchSize = 16;
constexpr double kLearningRate = 5e-3;
constexpr uint64_t kSeed = 42;

constexpr int kBatches = 32;       // taken in turn
constexpr int kCheckedSteps = 20;  // enough for a wrong gradient to show in the loss

struct Batch {
  at::Tensor ids, targets;  // [B, T]
};

// The repeat task: one random id in a row, again and again.
std::vector<Batch> draw_batches() {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(kSeed);
  std::vector<Batch> batches;
  for (int i = 0; i < kBatches; ++i) {
    const auto tokens =
        at::randint(0, kVocabSize, {kBatchSize, 1}, generator, at::TensorOptions(at::kLong))
            .repeat({1, kTokens + 1});  // [B, T + 1]
    batches.push_back({tokens.narrow(1, 0, kTokens), tokens.narrow(1, 1, kTokens)});
  }
  return batches;
}

attn::TinyAttentionLM make_model(attn::Implementation implementation) {
  at::manual_seed(kSeed);
  return attn::TinyAttentionLM(attn::TinyAttentionLMOptions(kVocabSize, kWidth, kHeads, kTokens)
                                   .implementation(implementation));
}

class Training {
 public:
  explicit Training(attn::Implementation implementation)
      : model_(make_model(implementation)), batches_(draw_batches()) {
    for (const auto& parameter : model_->parameters()) {
      initial_.push_back(parameter.detach().clone());
    }
    restart();
  }

  // A loss that has reached 0 is not what training meets; and the optimiser makes its state in its
  // first step.
  void restart() {
    const c10::NoGradGuard no_grad;
    const auto parameters = model_->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(initial_[i]);
    optimiser_ = std::make_unique<torch::optim::Adam>(parameters, kLearningRate);
    next_ = 0;
  }

  double step() {
    const auto& batch = batches_[next_];
    next_ = (next_ + 1) % batches_.size();
    const auto logits = model_(batch.ids);  // [B, T, V]
    const auto loss = at::cross_entropy_loss(logits.flatten(0, 1), batch.targets.flatten());
    optimiser_->zero_grad();
    loss.backward();
    optimiser_->step();
    return loss.item<double>();
  }

  double loss_after(int steps) {
    restart();
    double loss = step();
    for (int i = 0; i < steps; ++i) loss = step();
    return loss;
  }

 private:
  attn::TinyAttentionLM model_;
  std::vector<Batch> batches_;
  std::vector<at::Tensor> initial_;
  std::unique_ptr<torch::optim::Adam> optimiser_;
  size_t next_ = 0;
};

Contender training_contender(const std::string& name, const std::shared_ptr<Training>& training) {
  return {.name = name,
          .repeat =
              [training](int64_t iterations) {
                for (int64_t i = 0; i < iterations; ++i) training->step();
              },
          .prepare =
              [training] {
                training->restart();
                training->step();
              }};
}

Contender inference_contender(const std::string& name, attn::TinyAttentionLM model) {
  return {name, [model, batches = draw_batches(), next = size_t{0}](int64_t iterations) mutable {
            const c10::InferenceMode inference;
            for (int64_t i = 0; i < iterations; ++i) {
              model->forward(batches[next].ids);
              next = (next + 1) % batches.size();
            }
          }};
}

Entry training_entry(const std::string& name) {
  const auto ours = std::make_shared<Training>(attn::Implementation::automatic);
  const auto math = std::make_shared<Training>(attn::Implementation::math);
  const double loss = ours->loss_after(kCheckedSteps);
  const double expected = math->loss_after(kCheckedSteps);
  // Adam divides by the gradients' size: rounding of the smallest ones shows in the fourth digit.
  if (!(std::abs(loss - expected) <= 1e-3 * expected)) {
    throw std::runtime_error(fmt::format("ours: the loss after {} steps must be {:.5f}, got {:.5f}",
                                         kCheckedSteps, expected, loss));
  }
  return {name, training_contender("ours", ours), {training_contender("math", math)}, {}};
}

Entry inference_entry(const std::string& name) {
  auto ours = make_model(attn::Implementation::automatic);
  auto math = make_model(attn::Implementation::math);
  const auto ids = draw_batches()[0].ids;
  const c10::InferenceMode inference;
  check_close("ours", ours->forward(ids), math->forward(ids), 2e-5);  // see attention_check.cpp
  return {name, inference_contender("ours", ours), {inference_contender("math", math)}, {}};
}

}  // namespace

void bench_lm(Session& session) {
  session.begin({.name = "TinyAttentionLM",
                 .title = fmt::format("TinyAttentionLM(V {}, C {}, H {}), B {}, T {}", kVocabSize,
                                      kWidth, kHeads, kBatchSize, kTokens),
                 .legend = "part",
                 .peers = {"math"},
                 .floors = {},
                 .unit = Unit::per_second});
  if (session.wants("training step")) session.add(training_entry("training step"));
  if (session.wants("inference")) session.add(inference_entry("inference"));
  session.end();
}

Served serve_lm(const std::string& part) {
  if (part == "inference") {
    auto model = make_model(attn::Implementation::automatic);
    return {inference_contender("ours", model), [model]() mutable {
              const c10::InferenceMode inference;
              const auto logits = model->forward(draw_batches()[0].ids);  // [B, T, V]
              return std::vector<double>{logits.abs().sum(at::kDouble).item<double>()};
            }};
  }
  if (part != "training") {
    throw apps::UsageError(fmt::format("lm must be training or inference, got {}", part));
  }
  const auto training = std::make_shared<Training>(attn::Implementation::automatic);
  return {training_contender("ours", training),
          [training] { return std::vector<double>{training->loss_after(kCheckedSteps)}; }};
}

}  // namespace bench
