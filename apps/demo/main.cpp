// attn_demo: the library's story, told with numbers that it checks. See --help.

#include "options.h"
#include "report.h"
#include "setup.h"
#include "stories.h"
#include "support/files.h"
#include "support/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace {

constexpr size_t kLeastText = 2048;  // below, a tenth is too few bytes to measure a loss on
constexpr size_t kMostText = size_t{4} << 20;  // keeps a run short; more is cut

std::string read_text(const demo::Options& options) {
  const auto text = apps::read_file(options.text, kMostText);
  // A window of seq_len + 1 bytes fits into a training part of nine hundredths.
  const auto least =
      std::max(kLeastText, static_cast<size_t>(options.sizes().seq_len + 2) * 100 / 9 + 1);
  if (text.size() < least) {
    throw std::runtime_error(fmt::format("--text {} must have at least {} bytes, got {}",
                                         options.text, least, text.size()));
  }
  if (text.find_first_not_of(text[0]) == std::string::npos) {
    throw std::runtime_error(
        fmt::format("--text {} must hold more than one value, got {} times byte {}", options.text,
                    text.size(), static_cast<unsigned char>(text[0])));
  }
  return text;
}

int run(const demo::Options& options) {
  const auto begin = std::chrono::steady_clock::now();
  const auto text = options.text.empty() ? std::string() : read_text(options);
  for (const auto& path : {options.svg, options.json}) {
    if (!path.empty()) apps::check_writable(path);
  }
  const auto setup = demo::make_setup(options);

  const apps::Console console;
  demo::Report report(console);
  report.keep("attn", demo::attn_version());
  report.keep("libtorch", demo::torch_version());
  report.keep("device", setup.device.str());
  report.keep("instruction_set", setup.instruction_set);
  report.keep("threads", setup.threads);
  console.print(fmt::format("{}; {} ({}), {} thread{}\n", demo::versions(), setup.device.str(),
                            setup.instruction_set, setup.threads, setup.threads == 1 ? "" : "s"));

  std::string svg;
  if (text.empty()) {
    demo::tell_self_attention(report, setup, options.self_attention_seed());
    svg = demo::tell_language_model(report, setup, options);
    demo::tell_block_stack(report, setup, options.language_model_seed());
  } else {
    svg = demo::tell_text(report, setup, options, text);
  }

  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const bool ok = report.finish(seconds.count());
  if (!options.svg.empty()) apps::write_file(options.svg, svg);
  if (!options.json.empty()) apps::write_file(options.json, report.json());
  return ok ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return apps::run_program("attn_demo", [&] {
    const auto options = demo::parse_options(argc, argv, demo::versions());
    return options ? run(*options) : 0;
  });
}
