// Generation with a GPT-2 folder that the other process wrote, see peers.py.

#include "serve.h"
#include "support/program.h"

#include <attn/generation.h>
#include <attn/models/gpt2.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>

#include <fmt/format.h>

#include <memory>
#include <sstream>

namespace bench {
namespace {

// Ids [1, T] that both processes make alike.
at::Tensor prompt_of(int64_t length, int64_t vocab_size) {
  return at::arange(length, at::kLong).mul(7919).add(11).remainder(vocab_size).unsqueeze(0);
}

// A token with `length` tokens in the cache: always the same one, so a turn can be of any size.
class Step {
 public:
  Step(attn::GPT model, int64_t length)
      : model_(std::move(model)),
        length_(length),
        token_(at::ones({1, 1}, at::kLong)),
        cache_(model_->make_cache(1, length + 1)) {
    const c10::InferenceMode inference;
    model_->last_logits(prompt_of(length, model_->vocab_size()), {}, &cache_);
  }
  void run() {
    const c10::InferenceMode inference;
    model_->last_logits(token_, {}, &cache_);
    cache_.truncate(length_);
  }

 private:
  attn::GPT model_;
  int64_t length_;
  at::Tensor token_;
  attn::KVCache cache_;
};

}  // namespace

Served serve_generate(const std::string& which) {
  std::istringstream words(which);
  std::string dtype, part, number, folder;
  std::getline(words, dtype, ',');
  std::getline(words, part, ',');
  std::getline(words, number, ',');
  std::getline(words, folder);
  const bool known = (dtype == "float32" || dtype == "bfloat16") &&
                     (part == "decode" || part == "prefill" || part == "step");
  const int64_t length = std::atoll(number.c_str());
  if (!known || length < 1 || folder.empty()) {
    throw apps::UsageError(fmt::format(
        "generate must be float32 or bfloat16, decode, prefill or step, a number, a folder; got {}",
        which));
  }
  auto model = attn::load_gpt2(folder, at::kCPU, dtype == "float32" ? at::kFloat : at::kBFloat16);
  if (part == "step") {
    const auto step = std::make_shared<Step>(model, length);
    return {{"ours",
             [step](int64_t iterations) {
               for (int64_t i = 0; i < iterations; ++i) step->run();
             }},
            {}};
  }
  // decode: so many tokens behind a prompt of 16; prefill: one token behind so many.
  const auto prompt = prompt_of(part == "decode" ? 16 : length, model->vocab_size());
  auto generate = [model, prompt, count = part == "decode" ? length : 1]() mutable {
    return attn::generate(model, prompt, {.max_new_tokens = count, .temperature = 0.0});
  };
  return {{"ours",
           [generate](int64_t iterations) mutable {
             for (int64_t i = 0; i < iterations; ++i) generate();
           }},
          [generate]() mutable {
            const auto ids = generate().to(at::kDouble).flatten();
            return std::vector<double>(ids.data_ptr<double>(),
                                       ids.data_ptr<double>() + ids.numel());
          }};
}

}  // namespace bench
