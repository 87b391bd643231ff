#pragma once

#include "options.h"
#include "support/console.h"

#include <attn/models/tiny_attention_lm.h>

#include <functional>
#include <memory>

namespace demo {

/// ids [B, T], and at each position the id that follows, [B, T].
struct Batch {
  at::Tensor ids;
  at::Tensor targets;
};

/// Cross entropy of the model's next-token predictions in nats, a scalar.
at::Tensor loss_of(attn::TinyAttentionLM& model, const Batch& batch);
/// The same, one value per position: [B, T].
at::Tensor losses_of(attn::TinyAttentionLM& model, const Batch& batch);

enum class Schedule { constant, cosine };

/// Adam on a TinyAttentionLM, with a progress bar.
class Training {
 public:
  Training(const apps::Console& console, const attn::TinyAttentionLM& model,
           const LanguageModelSizes& sizes, double learning_rate, Schedule schedule);
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  /// One epoch; returns the mean of its steps' losses. `after_step`, if given, gets the number of
  /// steps taken since the beginning.
  double epoch(const std::function<Batch()>& next_batch,
               const std::function<void(int64_t)>& after_step = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace demo
