#include "training.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <torch/optim/adam.h>

#include <fmt/format.h>

#include <cmath>
#include <numbers>

namespace demo {

at::Tensor loss_of(attn::TinyAttentionLM& model, const Batch& batch) {
  const auto logits = model(batch.ids);                                          // [B, T, V]
  return at::cross_entropy_loss(logits.flatten(0, 1), batch.targets.flatten());  // []
}

at::Tensor losses_of(attn::TinyAttentionLM& model, const Batch& batch) {
  const auto logits = model(batch.ids);  // [B, T, V]
  return at::cross_entropy_loss(logits.flatten(0, 1), batch.targets.flatten(), /*weight=*/{},
                                at::Reduction::None)
      .view(batch.targets.sizes());  // [B, T]
}

struct Training::State {
  const apps::Console& console;
  attn::TinyAttentionLM model;
  LanguageModelSizes sizes;
  double learning_rate;
  Schedule schedule;
  torch::optim::Adam optimiser;
  int64_t steps = 0;

  void set_learning_rate() {
    if (schedule == Schedule::constant) return;
    // Half a cosine, from the full rate to 0.
    const double progress =
        static_cast<double>(steps) / static_cast<double>(sizes.epochs * sizes.steps_per_epoch);
    const double rate = learning_rate * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
    for (auto& group : optimiser.param_groups()) {
      static_cast<torch::optim::AdamOptions&>(group.options()).lr(rate);
    }
  }

  double step(const Batch& batch) {
    set_learning_rate();
    const auto loss = loss_of(model, batch);
    optimiser.zero_grad();
    loss.backward();
    optimiser.step();
    ++steps;
    return loss.item<double>();
  }
};

Training::Training(const apps::Console& console, const attn::TinyAttentionLM& model,
                   const LanguageModelSizes& sizes, double learning_rate, Schedule schedule)
    : state_(new State{console, model, sizes, learning_rate, schedule,
                       torch::optim::Adam(model->parameters(), learning_rate)}) {}

Training::~Training() = default;

double Training::epoch(const std::function<Batch()>& next_batch,
                       const std::function<void(int64_t)>& after_step) {
  auto& state = *state_;
  const auto total = state.sizes.steps_per_epoch;
  const auto label = fmt::format("epoch {}/{}", state.steps / total + 1, state.sizes.epochs);
  apps::ProgressBar progress(state.console);
  double sum = 0.0;
  for (int64_t i = 0; i < total; ++i) {
    const double loss = state.step(next_batch());
    sum += loss;
    progress.update(label, i + 1, total, fmt::format("loss {:.4f}", loss));
    if (after_step) after_step(state.steps);
  }
  progress.clear();
  return sum / static_cast<double>(total);
}

}  // namespace demo
