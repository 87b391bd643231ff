#include "attn/generation.h"

#include "checks.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <mutex>

namespace attn {
namespace {

// Eval mode while it lives. A model in eval mode is not touched: threads may share it.
class EvalMode {
 public:
  explicit EvalMode(torch::nn::Module* root) {
    if (root == nullptr) return;
    bool any = false;
    for (const auto& module : root->modules()) {
      modules_.emplace_back(module, module->is_training());
      any = any || module->is_training();
    }
    if (any) {
      root->eval();
    } else {
      modules_.clear();
    }
  }
  ~EvalMode() {
    for (const auto& [module, training] : modules_) {  // parents before their children
      if (module->is_training() != training) module->train(training);
    }
  }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modules_;
};

void check(const GenerateOptions& o, const CausalLM& model, const Tensor& prompt) {
  check_token_sequences(prompt, model.vocab_size());
  TORCH_CHECK_VALUE(prompt.size(1) >= 1, "the prompt must have at least 1 token, got ",
                    prompt.size(1));
  TORCH_CHECK_VALUE(o.max_new_tokens >= 0, "max_new_tokens must be at least 0, got ",
                    o.max_new_tokens);
  TORCH_CHECK_VALUE(std::isfinite(o.temperature) && o.temperature >= 0.0,
                    "temperature must be finite and at least 0, got ", o.temperature);
  TORCH_CHECK_VALUE(!o.top_p || (*o.top_p > 0.0 && *o.top_p <= 1.0),
                    "top_p must be in (0, 1], got ", o.top_p.value_or(0.0));
  TORCH_CHECK_VALUE(!(o.seed && o.generator), "seed and generator exclude each other, got both");
  TORCH_CHECK_VALUE(o.used_vocab >= 0 && o.used_vocab <= model.vocab_size(),
                    "used_vocab must be in [0, ", model.vocab_size(), "], got ", o.used_vocab);
  for (const int64_t token : o.stop_tokens) {
    TORCH_CHECK_VALUE(token >= 0 && token < model.vocab_size(), "stop tokens must be in [0, ",
                      model.vocab_size(), "), got ", token);
  }
  const auto& mask = o.key_padding_mask;
  if (!mask.defined()) return;
  TORCH_CHECK_VALUE(mask.scalar_type() == at::kBool && mask.sizes() == prompt.sizes(),
                    "key_padding_mask must be bool ", prompt.sizes(), ", got ", mask.scalar_type(),
                    " ", mask.sizes());
  TORCH_CHECK_VALUE(!mask.select(1, -1).any().item<bool>(),
                    "prompts must be padded on the left, got padding at the last position");
}

std::optional<at::Generator> generator_of(const GenerateOptions& options, at::Device device) {
  if (!options.seed) return options.generator;
  auto shared = at::globalContext().defaultGenerator(device);  // a handle
  auto generator = [&] {
    const std::lock_guard<std::mutex> lock(shared.mutex());  // others may be drawing from it
    return shared.clone();
  }();
  generator.set_current_seed(*options.seed);
  return generator;
}

// The logits of a step, [B, V] -> ids [B, 1].
class Sampler {
 public:
  Sampler(const GenerateOptions& options, at::Device device)
      : options_(options), generator_(generator_of(options, device)) {}

  Tensor operator()(const Tensor& last) const {
    auto logits = last.scalar_type() == at::kDouble ? last : last.to(at::kFloat);
    if (options_.used_vocab > 0) logits = logits.narrow(1, 0, options_.used_vocab);
    if (options_.temperature == 0.0) {
      check_numbers(logits);
      return logits.argmax(1, /*keepdim=*/true);
    }
    logits = keep_top_k(divided(logits));
    auto probabilities = logits.softmax(1);
    check_numbers(probabilities);
    if (options_.top_p && *options_.top_p < 1.0) probabilities = keep_top_p(probabilities);
    return probabilities.multinomial(1, /*replacement=*/false, generator_);
  }

 private:
  static void check_numbers(const Tensor& x) {
    TORCH_CHECK_VALUE(!x.isnan().any().item<bool>(), "the model's logits must be numbers, got NaN");
  }

  Tensor divided(const Tensor& logits) const {
    if (options_.temperature == 1.0) return logits;
    auto scaled = logits / options_.temperature;
    // A tiny temperature overflows; what matters is the distance to the greatest, which does so
    // harmlessly.
    if (!scaled.isfinite().all().item<bool>() && logits.isfinite().all().item<bool>())
      scaled = (logits - logits.amax(1, /*keepdim=*/true)) / options_.temperature;
    return scaled;
  }

  Tensor keep_top_k(const Tensor& logits) const {
    const int64_t k = std::min(options_.top_k.value_or(0), logits.size(1));
    if (k <= 0) return logits;
    const auto least = std::get<0>(logits.topk(k, 1)).narrow(1, k - 1, 1);  // [B, 1]
    return logits.masked_fill(logits < least, -std::numeric_limits<double>::infinity());
  }

  Tensor keep_top_p(const Tensor& probabilities) const {
    const auto [sorted, order] = probabilities.sort(/*stable=*/true, 1, /*descending=*/true);
    const auto before = sorted.cumsum(1) - sorted;  // [B, V]: what is more likely
    const auto kept = sorted.masked_fill(before >= *options_.top_p, 0.0);
    return at::zeros_like(probabilities).scatter(1, order, kept);
  }

  const GenerateOptions& options_;
  std::optional<at::Generator> generator_;
};

// Which rows are done, and what they are padded with.
class Stops {
 public:
  Stops(const std::vector<int64_t>& tokens, const Tensor& prompt) {
    if (tokens.empty()) return;
    tokens_ = at::tensor(tokens, at::kLong).to(prompt.device());
    done_ = at::zeros({prompt.size(0), 1}, prompt.options().dtype(at::kBool));
    padding_ = at::zeros({prompt.size(0), 1}, prompt.options().dtype(at::kLong));
  }

  /// ids [B, 1] with the rows that are done padded.
  Tensor apply(const Tensor& ids) {
    if (!tokens_.defined()) return ids;
    const auto next = at::where(done_, padding_, ids);
    padding_ = next;
    done_ = done_.logical_or(next.eq(tokens_).any(1, /*keepdim=*/true));
    return next;
  }
  bool all() const { return tokens_.defined() && done_.all().item<bool>(); }

 private:
  Tensor tokens_, done_, padding_;
};

}  // namespace

Tensor generate(CausalLM& model, const Tensor& prompt, const GenerateOptions& options) {
  check(options, model, prompt);
  const c10::NoGradGuard no_grad;
  const EvalMode eval(model.module());
  const int64_t B = prompt.size(0), T = prompt.size(1), context = model.context_length();
  const int64_t most = T + options.max_new_tokens;
  const auto ids = at::empty({B, most}, prompt.options().dtype(at::kLong));
  ids.narrow(1, 0, T).copy_(prompt);
  Tensor mask;
  if (options.key_padding_mask.defined()) {
    mask = at::zeros({B, most}, ids.options().dtype(at::kBool));
    mask.narrow(1, 0, T).copy_(options.key_padding_mask);
  }
  const Sampler sample(options, ids.device());
  Stops stops(options.stop_tokens, ids);
  std::optional<KVCache> cache;
  if (options.use_cache && T <= context && options.max_new_tokens > 1)
    cache = model.make_cache(B, std::min(most - 1, context));

  int64_t length = T;
  while (length < most) {
    const bool cached = cache && length <= context;
    const int64_t window = std::min(length, context);
    const int64_t seen = cached ? cache->length() : 0;
    const auto part = [&](const Tensor& x, int64_t size) {
      return x.narrow(1, length - size, size);
    };
    const auto logits =
        model.last_logits(part(ids, window - seen), mask.defined() ? part(mask, window) : Tensor(),
                          cached ? &*cache : nullptr);
    const auto next = stops.apply(sample(logits));  // [B, 1]
    ids.narrow(1, length, 1).copy_(next);
    ++length;
    if (options.on_token && !options.on_token(next.squeeze(1))) break;
    if (stops.all()) break;
  }
  return length == most ? ids : ids.narrow(1, 0, length).clone();
}

}  // namespace attn
