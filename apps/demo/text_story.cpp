#include "byte_corpus.h"
#include "byte_windows.h"
#include "stories.h"
#include "support/printable.h"
#include "training.h"

#include <attn/heatmap.h>
#include <attn/state_dict.h>
#include <attn/summary.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace demo {
namespace {

constexpr int64_t kLookEvery = 20;  // steps between two looks at the held-out bytes
constexpr size_t kLookAt = 128;     // windows of a look

attn::StateDict copy_of(const attn::StateDict& state) {
  attn::StateDict copy;
  for (const auto& item : state) copy.insert(item.key(), item.value().clone());
  return copy;
}

// Trains, and leaves the model with the weights that did best on the held-out bytes: a small text
// is soon known by heart.
void train(Report& report, const LanguageModelSizes& sizes, ByteWindows& windows,
           const std::vector<Window>& held_out, attn::TinyAttentionLM& model) {
  const auto some = spread(held_out, kLookAt);
  double best = std::numeric_limits<double>::infinity();
  double latest = best;
  int64_t best_step = 0;
  attn::StateDict best_state;
  const auto look = [&](int64_t step) {
    if (step % kLookEvery != 0) return;
    latest = windows.score(model, some);
    if (latest >= best) return;
    best = latest;
    best_step = step;
    best_state = copy_of(attn::state_dict(*model));
  };

  // lr 1e-2 with a cosine: the best of 5e-3 and 1e-2, with and without, on three texts of 13 to 300
  // kB.
  Training training(report.console(), model, sizes, 1e-2, Schedule::cosine);
  std::vector<double> losses;
  std::vector<double> looks;
  report.line(fmt::format("{:<12}{:>10}{:>12}", "", "training", "held out"));
  for (int64_t epoch = 1; epoch <= sizes.epochs; ++epoch) {
    losses.push_back(training.epoch([&windows] { return windows.random_batch(); }, look));
    looks.push_back(latest);
    report.line(fmt::format("{:<12}{:>10.4f}{:>12.4f}", fmt::format("epoch {}", epoch),
                            losses.back(), latest));
  }
  report.keep("epoch_losses", losses);
  report.keep("epoch_held_out_losses", looks);
  report.keep("kept_step", best_step);
  report.note(
      fmt::format("Kept: step {}, the best of a look every {} steps.", best_step, kLookEvery));
  if (best_step > 0) attn::load_state_dict(*model, best_state);
}

// Some bytes of the held-out text from the beginning of a word on, whole characters only.
std::string choose_prompt(const ByteCorpus& corpus, int64_t seq_len) {
  const auto span = corpus.held_out()[4];  // near the middle
  const auto& bytes = corpus.bytes();
  const auto continues = [&bytes](size_t i) {
    return i < bytes.size() && (static_cast<unsigned char>(bytes[i]) & 0xC0U) == 0x80U;
  };
  auto first = span.first;
  const auto space = bytes.find_first_of(" \n", first);
  if (space < span.first + (span.last - span.first) / 2) first = space + 1;
  while (first < span.last && continues(first)) ++first;
  auto last = std::min(span.last, first + static_cast<size_t>(std::min<int64_t>(seq_len, 48)));
  while (last > first + 1 && continues(last)) --last;
  return bytes.substr(first, std::max<size_t>(1, last - first));
}

at::Tensor ids_of(const std::string& bytes, const Setup& setup) {
  std::vector<int64_t> ids;
  for (const char c : bytes) ids.push_back(static_cast<unsigned char>(c));
  return at::tensor(ids).unsqueeze(0).to(setup.device);  // [1, T]
}

std::string continue_text(attn::TinyAttentionLM& model, const Setup& setup, uint64_t seed,
                          const std::string& prompt, size_t length, double temperature) {
  const c10::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto context = static_cast<size_t>(model->options.max_context_length());
  std::string text = prompt;
  while (text.size() < prompt.size() + length) {
    const auto window = text.substr(text.size() - std::min(text.size(), context));
    const auto logits = model(ids_of(window, setup)).select(1, -1).cpu();  // [1, V]
    const auto next = at::multinomial(at::softmax(logits / temperature, -1), 1, false, generator);
    text += static_cast<char>(next.item<int64_t>());
  }
  return text.substr(prompt.size());
}

void show_text(Report& report, std::string_view bytes, size_t most_lines) {
  auto lines = apps::printable_lines(bytes, std::min<size_t>(report.console().columns(), 80) - 6);
  if (lines.size() > most_lines) lines.resize(most_lines);
  for (const auto& line : lines) report.line(line.empty() ? "|" : "| " + line);
}

std::string heatmap(attn::TinyAttentionLM& model, const Setup& setup, const std::string& prompt) {
  const c10::NoGradGuard no_grad;
  const auto weights =
      std::get<1>(model->forward_with_weights(ids_of(prompt, setup)))[0];  // [H, T, T]
  std::vector<std::string> labels;
  for (size_t i = 0; i < prompt.size(); ++i) labels.push_back(apps::printable(prompt.substr(i, 1)));
  return attn::svg_heatmap(weights.narrow(0, 0, std::min<int64_t>(16, weights.size(0))),
                           {.title = "TinyAttentionLM: " + apps::printable(prompt),
                            .query_labels = labels,
                            .key_labels = labels});
}

}  // namespace

std::string tell_text(Report& report, const Setup& setup, const Options& options,
                      std::string_view bytes) {
  const auto sizes = options.sizes();
  const auto seed = options.language_model_seed();
  const ByteCorpus corpus(bytes);

  report.chapter("text", fmt::format("The text: {}", apps::printable(options.text)));
  report.value("bytes", "bytes", static_cast<int64_t>(bytes.size()));
  report.value("held_out_bytes", "held out", static_cast<int64_t>(corpus.held_out_size()),
               "every tenth of 100 equal parts");
  const double entropy = corpus.unigram_entropy();
  report.value("unigram_entropy", "unigram entropy", entropy, "nats per byte, of the whole text");
  report.value("bigram_entropy", "bigram entropy", corpus.bigram_entropy(),
               "nats per byte, given the byte before");

  at::manual_seed(seed);
  attn::TinyAttentionLM model(sizes.vocab_size, sizes.d_model, sizes.n_heads, sizes.seq_len);
  model->to(setup.device);
  report.chapter("training", fmt::format("TinyAttentionLM(256, {}, {}, {}): {} epochs of {} steps",
                                         sizes.d_model, sizes.n_heads, sizes.seq_len, sizes.epochs,
                                         sizes.steps_per_epoch));
  report.value("parameters", "parameters", attn::count_parameters(*model));
  report.line();
  ByteWindows windows(corpus, sizes, setup, seed);
  const auto held_out = scoring_windows(corpus.held_out(), sizes.seq_len);
  train(report, sizes, windows, held_out, model);

  report.chapter("loss", "Cross entropy in nats per byte");
  const auto same_bytes =
      spread(scoring_windows(corpus.training(), sizes.seq_len), held_out.size());
  const NatsPerByte lm{windows.score(model, same_bytes), windows.score(model, held_out)};
  const double uniform = std::log(256.0);
  const auto row = [&](const char* key, const char* name, const NatsPerByte& loss) {
    report.keep(fmt::format("{}_training", key), loss.training);
    report.keep(fmt::format("{}_held_out", key), loss.held_out);
    report.line(fmt::format("{:<18}{:>8.4f}{:>12.4f}  {}", name, loss.training, loss.held_out,
                            apps::bar(loss.held_out, uniform, 30)));
  };
  const auto unigram = corpus.unigram();
  report.line(fmt::format("{:<18}{:>8}{:>12}", "", "training", "held out"));
  row("uniform", "uniform, ln 256", {uniform, uniform});
  row("unigram", "unigram", unigram);
  row("bigram", "bigram", corpus.bigram());
  row("tiny_attention_lm", "TinyAttentionLM", lm);
  report.note("Unigram and bigram: counts of the training parts, smoothed (add-one; Witten-Bell).");
  report.line();
  report.check("held-out loss is below the unigram model's", lm.held_out < unigram.held_out);
  report.check("held-out loss is below the unigram entropy of the text", lm.held_out < entropy);

  report.chapter("continuation", "Held-out bytes, and how the model goes on (temperature 0.8)");
  const auto prompt = choose_prompt(corpus, sizes.seq_len);
  const auto continuation = continue_text(model, setup, seed, prompt, 400, 0.8);
  report.keep("prompt", apps::printable(prompt));
  report.keep("text", apps::printable(continuation));
  show_text(report, prompt, 3);
  report.line();
  show_text(report, continuation, 8);
  return heatmap(model, setup, prompt);
}

}  // namespace demo
