#include "options.h"

#include "support/command_line.h"
#include "support/program.h"

namespace generate {

std::optional<Options> parse_options(int argc, char** argv, const std::string& version) {
  Options options;
  CLI::App app(
      "Continues a text with a language model: a Hugging Face GPT-2 folder, or one that attn "
      "wrote.\n"
      "The text streams to standard output; tokens per second go to standard error.",
      "attn_generate");
  app.get_formatter()->column_width(26);
  app.set_version_flag("--version", version, "Print the versions of attn and LibTorch and exit");

  auto* model = app.add_option("--model", options.model,
                               "The model's folder, or its weights file with config.json beside it")
                    ->check(apps::file_name())
                    ->type_name("PATH");
  app.add_flag("--demo", options.demo, "Instead, a tiny model with random weights: it babbles")
      ->excludes(model);

  auto* prompt =
      app.add_option("--prompt", options.prompt, "The text to continue")->type_name("TEXT");
  auto* ids = app.add_option("--ids", options.ids, "The same as token ids: 1,2,3")
                  ->delimiter(',')
                  ->check(apps::whole_number(0, INT32_MAX))
                  ->type_name("IDS");
  auto* input =
      app.add_flag("--stdin", options.standard_input, "The text to continue is standard input");
  ids->excludes(prompt);
  input->excludes(prompt)->excludes(ids);

  app.add_option("--max-new-tokens", options.max_new_tokens, "The most tokens to add (128)")
      ->check(apps::whole_number(0, int64_t{1} << 24))
      ->type_name("N");
  app.add_option("--temperature", options.temperature,
                 "Divides the logits (1); 0 takes the likeliest token each time")
      ->check(apps::real_number(0.0, 1e6))
      ->type_name("X");
  app.add_option("--top-k", options.top_k, "Draw from the k likeliest tokens only")
      ->check(apps::whole_number(1, INT32_MAX))
      ->type_name("K");
  app.add_option("--top-p", options.top_p, "Draw from the fewest tokens that reach probability p")
      ->check(apps::real_number(1e-9, 1.0))
      ->type_name("P");
  app.add_option("--seed", options.seed,
                 "Seed of the draws: the same text again (a new one each time)")
      ->check(apps::whole_number(0, INT64_MAX))
      ->type_name("N");
  app.add_option("--stop", options.stop, "End before this text (may be given several times)")
      ->take_all()
      ->type_name("TEXT");

  app.add_option("--dtype", options.dtype, "float32, bfloat16, float16 or float64 (float32)")
      ->check(CLI::Validator(
          [](const std::string& name) {
            const bool known =
                name == "float32" || name == "bfloat16" || name == "float16" || name == "float64";
            return known ? "" : "must be float32, bfloat16, float16 or float64, got " + name;
          },
          ""))
      ->type_name("NAME");
  app.add_option("--device", options.device, "Where to compute: cpu, cuda or cuda:N (cpu)")
      ->check(apps::device_name())
      ->type_name("NAME");
  app.add_option("--threads", options.threads, "Threads of LibTorch (as many as it takes)")
      ->check(apps::whole_number(1, 1024))
      ->type_name("N");
  app.add_flag("--json", options.json,
               "Print one JSON object at the end, not the text as it comes");

  if (!apps::parse_command_line(app, argc, argv, version)) return std::nullopt;
  if (options.model.empty() && !options.demo) {
    throw apps::UsageError("--model PATH or --demo must be given, got neither (see --help)");
  }
  const bool some_prompt = options.prompt || !options.ids.empty() || options.standard_input;
  if (!some_prompt && options.demo) options.prompt = "Attention";
  if (!some_prompt && !options.demo) {
    throw apps::UsageError("--prompt, --ids or --stdin must be given, got none");
  }
  for (const auto& text : options.stop) {
    if (text.empty()) throw apps::UsageError("--stop must be a text, got an empty one");
  }
  return options;
}

}  // namespace generate
