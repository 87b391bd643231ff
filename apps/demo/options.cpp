#include "options.h"

#include "support/command_line.h"
#include "support/program.h"

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <system_error>

namespace demo {
namespace {

// Weights of one forward with their gradients stay below 0.5 GiB.
constexpr int64_t kMostWeights = int64_t{1} << 26;

void check(const Options& options) {
  const auto sizes = options.sizes();
  if (sizes.d_model % 2 != 0) {
    throw apps::UsageError(fmt::format("--d-model must be even, got {}", sizes.d_model));
  }
  if (sizes.d_model % sizes.n_heads != 0) {
    throw apps::UsageError(fmt::format("--d-model must be a multiple of --n-heads ({}), got {}",
                                       sizes.n_heads, sizes.d_model));
  }
  const auto weights = sizes.batch_size * sizes.n_heads * sizes.seq_len * sizes.seq_len;
  if (weights > kMostWeights) {
    throw apps::UsageError(
        fmt::format("--n-heads times the square of --seq-len must be at most {}, got {}",
                    kMostWeights / sizes.batch_size, weights / sizes.batch_size));
  }
  const auto must_differ = [](const char* name, const std::string& path, const char* other_name,
                              const std::string& other) {
    std::error_code ignored;
    if (path.empty() || other.empty()) return;
    if (path == other || std::filesystem::equivalent(path, other, ignored)) {
      throw apps::UsageError(
          fmt::format("{} and {} must be two files, got {}", name, other_name, other));
    }
  };
  must_differ("--text", options.text, "--svg", options.svg);
  must_differ("--text", options.text, "--json", options.json);
  must_differ("--svg", options.svg, "--json", options.json);
}

}  // namespace

LanguageModelSizes Options::sizes() const {
  auto sizes = text.empty() ? LanguageModelSizes{.vocab_size = 64,
                                                 .d_model = 32,
                                                 .n_heads = 4,
                                                 .seq_len = 12,
                                                 .batch_size = 16,
                                                 .epochs = 3,
                                                 .steps_per_epoch = 120}
                            : LanguageModelSizes{.vocab_size = 256,
                                                 .d_model = 64,
                                                 .n_heads = 4,
                                                 .seq_len = 32,
                                                 .batch_size = 32,
                                                 .epochs = 5,
                                                 .steps_per_epoch = 120};
  sizes.d_model = d_model.value_or(sizes.d_model);
  sizes.n_heads = n_heads.value_or(sizes.n_heads);
  sizes.seq_len = seq_len.value_or(sizes.seq_len);
  sizes.epochs = epochs.value_or(sizes.epochs);
  return sizes;
}

std::optional<Options> parse_options(int argc, char** argv, const std::string& version) {
  Options options;
  CLI::App app(
      "Self-attention step by step: shapes, causality, a tiny language model, deep stacks.\n"
      "Ends with \"Demo OK.\" and exit code 0 if every check holds.",
      "attn_demo");
  app.get_formatter()->column_width(22);
  app.set_version_flag("--version", version, "Print the versions of attn and LibTorch and exit");
  app.add_option("--device", options.device, "Where to compute: cpu, cuda or cuda:N (cpu)")
      ->check(apps::device_name())
      ->type_name("NAME");
  app.add_option("--seed", options.seed, "Seed of every draw (0 for SelfAttention, 42 after it)")
      ->check(apps::whole_number(0, INT64_MAX))
      ->type_name("N");
  app.add_option("--threads", options.threads,
                 "Threads of LibTorch (1: the models are too small to gain from more)")
      ->check(apps::whole_number(1, 1024))
      ->type_name("N");
  app.add_option("--d-model", options.d_model, "Width of the language model (32; 64 with --text)")
      ->check(apps::whole_number(2, 1024))
      ->type_name("N");
  app.add_option("--n-heads", options.n_heads, "Heads of the language model (4)")
      ->check(apps::whole_number(1, 512))
      ->type_name("N");
  app.add_option("--seq-len", options.seq_len, "Tokens it sees at once (12; 32 with --text)")
      ->check(apps::whole_number(1, 512))
      ->type_name("N");
  app.add_option("--epochs", options.epochs, "Epochs of 120 steps (3; 5 with --text)")
      ->check(apps::whole_number(1, 1000))
      ->type_name("N");
  app.add_option("--text", options.text, "Instead, learn this file byte by byte, and continue it")
      ->check(apps::file_name())
      ->type_name("FILE");
  app.add_option("--svg", options.svg, "Write the attention weights of the trained model as SVG")
      ->check(apps::file_name())
      ->type_name("FILE");
  app.add_option("--json", options.json, "Write every printed number and check as JSON")
      ->check(apps::file_name())
      ->type_name("FILE");

  if (!apps::parse_command_line(app, argc, argv, version)) return std::nullopt;
  check(options);
  return options;
}

}  // namespace demo
