#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace demo {

/// A TinyAttentionLM and how it is trained.
struct LanguageModelSizes {
  int64_t vocab_size;
  int64_t d_model;
  int64_t n_heads;
  int64_t seq_len;
  int64_t batch_size;
  int64_t epochs;
  int64_t steps_per_epoch;
};

/// The command line.
struct Options {
  std::string device = "cpu";  ///< cpu, cuda or cuda:N
  std::optional<uint64_t> seed;
  int64_t threads = 1;  ///< such small models gain nothing from more, and wait for busy cores
  std::optional<int64_t> d_model;
  std::optional<int64_t> n_heads;
  std::optional<int64_t> seq_len;
  std::optional<int64_t> epochs;
  std::string text;  ///< paths; empty = not asked for
  std::string svg;
  std::string json;

  static constexpr uint64_t kSelfAttentionSeed = 0;   ///< the first seed document's
  static constexpr uint64_t kLanguageModelSeed = 42;  ///< the second one's

  uint64_t self_attention_seed() const { return seed.value_or(kSelfAttentionSeed); }
  uint64_t language_model_seed() const { return seed.value_or(kLanguageModelSeed); }
  /// The seed document's sizes, or the ones that suit a file of text, where not given.
  LanguageModelSizes sizes() const;
  /// Are the sizes those whose results are known?
  bool default_sizes() const { return !d_model && !n_heads && !seq_len && !epochs; }
};

/// Reads the command line; empty when --help or --version was asked for and has been answered.
/// @throws apps::UsageError
std::optional<Options> parse_options(int argc, char** argv, const std::string& version);

}  // namespace demo
