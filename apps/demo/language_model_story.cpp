#include "stories.h"
#include "tensors.h"
#include "training.h"

#include <attn/heatmap.h>
#include <attn/summary.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace demo {
namespace {

// What the second seed document's demo draws, in its order: one seed, so one chain of random
// numbers.
struct Draws {
  attn::MultiHeadSelfAttention attention;
  at::Tensor x;  // [B, T, C]
  attn::TinyAttentionLM model;
};

Draws draw(const LanguageModelSizes& sizes, const Setup& setup, uint64_t seed) {
  at::manual_seed(seed);
  attn::MultiHeadSelfAttention attention(sizes.d_model, sizes.n_heads, sizes.seq_len);
  const auto x = at::randn({sizes.batch_size, sizes.seq_len, sizes.d_model});
  attn::TinyAttentionLM model(sizes.vocab_size, sizes.d_model, sizes.n_heads, sizes.seq_len);
  attention->to(setup.device);
  model->to(setup.device);
  return {attention, x.to(setup.device), model};
}

void show_attention(Report& report, Draws& draws) {
  const c10::NoGradGuard no_grad;
  const auto& options = draws.attention->options;
  report.chapter(
      "multi_head_self_attention",
      fmt::format("MultiHeadSelfAttention(d_model = {}, n_heads = {}, max_context_length = {})",
                  options.d_model(), options.n_heads(), options.max_context_length()));
  const auto [out, weights] =
      draws.attention->forward_with_weights(draws.x);  // [B, T, C], [B, H, T, T]
  const double above = weights.triu(/*diagonal=*/1).abs().max().item<double>();
  const double row_error = (weights.sum(-1) - 1.0).abs().max().item<double>();

  report.shape("x", "x", "[B, T, C]", draws.x.sizes().vec());
  report.shape("output", "output", "[B, T, C]", out.sizes().vec());
  report.shape("weights", "weights", "[B, H, T, T]", weights.sizes().vec());
  report.line();
  report.value("greatest_weight_above_diagonal", "greatest future weight", above);
  report.value("greatest_row_sum_error", "greatest |row sum - 1|", row_error);
  report.line();
  report.check("the output has the input's shape", out.sizes() == draws.x.sizes());
  report.check("weights above the diagonal are exactly 0", above == 0.0);
  report.check("every row of weights sums to 1", row_error < 1e-5);
}

void show_model(Report& report, const LanguageModelSizes& sizes, attn::TinyAttentionLM& model) {
  report.chapter("tiny_attention_lm", "TinyAttentionLM: embeddings, one attention, a linear head");
  report.block(attn::summary(*model));
  const auto V = sizes.vocab_size;
  const auto C = sizes.d_model;
  const auto parameters = attn::count_parameters(*model);
  report.keep("parameters", parameters);
  report.line();
  report.check(fmt::format("there are 4C² + 4C + 2VC + V = {} parameters", with_commas(parameters)),
               parameters == 4 * C * C + 4 * C + 2 * V * C + V);
}

// The repeat task: one random id in a row, again and again.
class RepeatTask {
 public:
  RepeatTask(const LanguageModelSizes& sizes, const Setup& setup, uint64_t seed)
      : sizes_(sizes),
        device_(setup.device),
        generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}

  Batch batch() {
    const auto first = at::randint(0, sizes_.vocab_size, {sizes_.batch_size, 1}, generator_,
                                   at::TensorOptions(at::kLong));           // [B, 1]
    const auto tokens = first.to(device_).repeat({1, sizes_.seq_len + 1});  // [B, T + 1]
    return {tokens.narrow(1, 0, sizes_.seq_len), tokens.narrow(1, 1, sizes_.seq_len)};
  }

 private:
  LanguageModelSizes sizes_;
  c10::Device device_;
  at::Generator generator_;
};

void train(Report& report, const Setup& setup, const Options& options,
           attn::TinyAttentionLM& model) {
  const auto sizes = options.sizes();
  const auto seed = options.language_model_seed();
  report.chapter("training", fmt::format("Training: repeat a token, {} epochs of {} Adam steps",
                                         sizes.epochs, sizes.steps_per_epoch));
  constexpr size_t kBar = 40;
  const double guess = std::log(static_cast<double>(sizes.vocab_size));
  report.keep("ln_v", guess);
  report.line(fmt::format("{:<10}{:>8.4f}  {}  guessing", fmt::format("ln {}", sizes.vocab_size),
                          guess, apps::bar(1.0, 1.0, kBar)));

  // lr 5e-3: the second seed document's demo.
  Training training(report.console(), model, sizes, 5e-3, Schedule::constant);
  RepeatTask task(sizes, setup, seed);
  std::vector<double> losses;
  for (int64_t epoch = 1; epoch <= sizes.epochs; ++epoch) {
    losses.push_back(training.epoch([&task] { return task.batch(); }));
    report.line(fmt::format("{:<10}{:>8.4f}  {}", fmt::format("epoch {}", epoch), losses.back(),
                            apps::bar(losses.back(), guess, kBar)));
  }
  report.keep("epoch_losses", losses);
  report.line();

  report.check("the last epoch's mean loss is below ln V", losses.back() < guess);
  // PyTorch's Python code, the same draws. On a GPU the sums round differently, 360 times over.
  constexpr std::array<double, 3> kKnown = {2.8808, 0.0501, 0.0036};
  const bool known =
      options.default_sizes() && seed == Options::kLanguageModelSeed && setup.device.is_cpu();
  report.check_if(known, "default sizes, seed 42, CPU",
                  "the means are 2.8808, 0.0501 and 0.0036, as in Python",
                  std::equal(kKnown.begin(), kKnown.end(), losses.begin(), losses.end(),
                             [](double a, double b) { return std::abs(a - b) < 2e-4; }));
}

std::string show_heatmap(Report& report, const Setup& setup, const Options& options,
                         attn::TinyAttentionLM& model) {
  const c10::NoGradGuard no_grad;
  const auto sizes = options.sizes();
  report.chapter("heatmap", "What the heads look at: one row per query, one column per key");
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.language_model_seed() + 1);
  const auto id = at::randint(0, sizes.vocab_size, {1, 1}, generator, at::TensorOptions(at::kLong));
  const auto sample = id.to(setup.device).repeat({1, sizes.seq_len});  // [1, T]
  const auto [logits, weights] = model->forward_with_weights(sample);  // [1, T, V], [1, H, T, T]
  const auto right = (logits.argmax(-1) == sample).sum().item<int64_t>();

  // A screen has room for so much; the file keeps more.
  const auto cut = [maps = weights[0].cpu()](int64_t heads, int64_t tokens) {
    const auto H = std::min(heads, maps.size(0));
    const auto T = std::min(tokens, maps.size(1));
    return maps.narrow(0, 0, H).narrow(1, 0, T).narrow(2, 0, T);  // [H, T, T]
  };
  const auto shown = cut(8, 24);
  std::vector<std::string> blocks;
  for (int64_t h = 0; h < shown.size(0); ++h) {
    blocks.push_back(attn::text_heatmap(
        shown[h], {.title = fmt::format("head {}", h), .query_labels = {}, .key_labels = {}}));
  }
  report.block(apps::side_by_side(blocks, std::min<size_t>(report.console().columns(), 100) - 2));
  if (shown.numel() < weights.numel()) {
    report.note(fmt::format("({} of {} heads, {} of {} positions)", shown.size(0), sizes.n_heads,
                            shown.size(1), sizes.seq_len));
  }
  report.line();
  report.keep("sample_id", id.item<int64_t>());
  report.keep("right", right);
  report.line(
      fmt::format("A row of token {}: the model continues it rightly at {} of {} positions.",
                  id.item<int64_t>(), right, sizes.seq_len));
  report.line();
  report.check_if(options.default_sizes(), "default sizes", "the model has learned to repeat",
                  right == sizes.seq_len);
  return attn::svg_heatmap(
      cut(16, 64), {.title = fmt::format("TinyAttentionLM, token {} repeated", id.item<int64_t>()),
                    .query_labels = {},
                    .key_labels = {}});
}

}  // namespace

std::string tell_language_model(Report& report, const Setup& setup, const Options& options) {
  const auto sizes = options.sizes();
  auto draws = draw(sizes, setup, options.language_model_seed());
  show_attention(report, draws);
  show_model(report, sizes, draws.model);
  train(report, setup, options, draws.model);
  return show_heatmap(report, setup, options, draws.model);
}

}  // namespace demo
