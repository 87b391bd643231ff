// attn_generate: continues a text with a language model. See --help.

#include "options.h"
#include "support/console.h"
#include "support/device.h"
#include "support/files.h"
#include "support/program.h"
#include "writer.h"

#include <attn/generation.h>
#include <attn/model_folder.h>
#include <attn/models/gpt.h>
#include <attn/version.h>

#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>
#include <torch/utils.h>
#include <torch/version.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <random>
#include <stdexcept>

namespace {

using Clock = std::chrono::steady_clock;
using generate::Options;

constexpr size_t kMostText = size_t{64} << 20;

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

c10::ScalarType scalar_type(const std::string& name) {
  if (name == "bfloat16") return c10::kBFloat16;
  if (name == "float16") return c10::kHalf;
  return name == "float64" ? c10::kDouble : c10::kFloat;
}

attn::LanguageModel tiny_random_model(c10::Device device, c10::ScalarType dtype) {
  torch::manual_seed(0);
  attn::GPT model(
      attn::GPTOptions().vocab_size(256).context_length(128).d_model(64).num_heads(4).num_layers(
          2));
  model->to(device, dtype);
  model->eval();
  return {model.ptr(), attn::ByteLevelBPE::bytes()};
}

std::vector<int64_t> prompt_of(const Options& options, const attn::LanguageModel& lm) {
  const auto limit = lm.model->context_length();
  std::vector<int64_t> ids = options.ids;
  if (ids.empty()) {
    if (!lm.tokenizer) {
      throw std::runtime_error(
          fmt::format("{} must hold tokenizer.json, or vocab.json and merges.txt, for a text; got "
                      "neither: give the prompt as --ids, or add the files",
                      options.model));
    }
    const auto text =
        options.standard_input ? apps::read_file("/dev/stdin", kMostText) : *options.prompt;
    ids = lm.tokenizer->encode(text);
  }
  const std::string name = options.demo ? "the demo's model" : options.model;
  if (ids.empty()) {
    throw std::runtime_error("the prompt must have at least one token, got an empty one");
  }
  if (static_cast<int64_t>(ids.size()) > limit) {
    throw std::runtime_error(
        fmt::format("the prompt must have at most {} tokens, the context of {}, got {}; shorten it",
                    limit, name, ids.size()));
  }
  const auto greatest = *std::max_element(ids.begin(), ids.end());
  if (greatest >= lm.model->vocab_size()) {
    throw std::runtime_error(fmt::format("--ids must be below {}, the vocabulary of {}, got {}",
                                         lm.model->vocab_size(), name, greatest));
  }
  return ids;
}

std::string rate(int64_t tokens, double seconds) {
  return fmt::format("{} token{} in {:.2f} s{}", tokens, tokens == 1 ? "" : "s", seconds,
                     tokens > 0 && seconds > 0
                         ? fmt::format(" ({:.1f}/s)", static_cast<double>(tokens) / seconds)
                         : "");
}

int run(const Options& options) {
  const auto device = apps::find_device(options.device);
  if (options.threads) at::set_num_threads(static_cast<int>(*options.threads));
  const auto dtype = scalar_type(options.dtype);
  const auto lm = options.demo ? tiny_random_model(device, dtype)
                               : attn::load_language_model(options.model, device, dtype);
  const auto prompt = prompt_of(options, lm);
  const auto seed =
      options.seed.value_or((uint64_t{std::random_device{}()} << 31) ^ std::random_device{}());

  generate::Writer writer(lm.tokenizer, options.stop, options.json);
  std::vector<int64_t> added;
  std::vector<int64_t> end_of_text;
  if (lm.tokenizer) {
    if (const auto id = lm.tokenizer->token_to_id("<|endoftext|>")) end_of_text.push_back(*id);
  }
  auto first = Clock::now();
  const auto on_token = [&](const at::Tensor& ids) {
    if (added.empty()) first = Clock::now();
    const auto id = ids.item<int64_t>();
    added.push_back(id);
    const bool ended = std::find(end_of_text.begin(), end_of_text.end(), id) != end_of_text.end();
    return ended || writer.push(id);
  };

  const auto ids = at::tensor(prompt, at::kLong).unsqueeze(0).to(device);  // [1, T]
  const auto begin = Clock::now();
  attn::generate(*lm.model, ids,
                 {.max_new_tokens = options.max_new_tokens,
                  .temperature = options.temperature,
                  .top_k = options.top_k,
                  .top_p = options.top_p,
                  .seed = seed,
                  .stop_tokens = end_of_text,
                  .used_vocab = lm.tokenizer ? lm.tokenizer->vocab_size() : 0,
                  .on_token = on_token});
  const auto end = Clock::now();
  writer.finish();

  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  const auto new_tokens = static_cast<int64_t>(added.size());
  // The first token comes with the prompt's logits.
  const double prompt_seconds = added.empty() ? 0.0 : seconds_between(begin, first);
  const double decode_seconds = added.empty() ? 0.0 : seconds_between(first, end);
  if (options.json) {
    nlohmann::ordered_json result = {{"prompt_ids", prompt},
                                     {"ids", added},
                                     {"seed", seed},
                                     {"prompt_seconds", prompt_seconds},
                                     {"decode_seconds", decode_seconds}};
    if (lm.tokenizer) result["text"] = writer.text();
    apps::Console().print(result.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
                          "\n");
  }
  fmt::print(stderr, "prompt: {}; then {}\n", rate(prompt_tokens, prompt_seconds),
             rate(std::max<int64_t>(new_tokens - 1, 0), decode_seconds));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return apps::run_program("attn_generate", [&] {
    const auto version = fmt::format("attn {}, LibTorch {}", attn::version(), TORCH_VERSION);
    const auto options = generate::parse_options(argc, argv, version);
    return options ? run(*options) : 0;
  });
}
