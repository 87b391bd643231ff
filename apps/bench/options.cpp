#include "options.h"

#include "attention_modes.h"
#include "commands.h"
#include "support/command_line.h"

#include <fmt/format.h>

#include <algorithm>

namespace bench {
namespace {

std::string mode_names() {
  std::string names;
  for (const auto& mode : kAttentionModes) names += fmt::format("{}, ", mode.name);
  return names + "all";
}

std::string check_mode(const std::string& name) {
  const bool known = name == "all" || std::any_of(kAttentionModes.begin(), kAttentionModes.end(),
                                                  [&](const auto& m) { return m.name == name; });
  return known ? "" : fmt::format("must be one of {}; got {}", mode_names(), name);
}

void add_threads(CLI::App& command, Options& options) {
  command.add_option("--threads", options.threads, "Threads of LibTorch (as many as it takes)")
      ->check(apps::whole_number(1, 1024))
      ->type_name("N");
}

void add_table_options(CLI::App& command, Options& options) {
  command.add_option("--filter", options.filter, "Only rows whose name holds this")
      ->type_name("TEXT");
  command.add_flag("--quick", options.quick, "Fewer rounds of shorter turns: a smoke test");
  command.add_option("--json", options.json, "Write everything measured, each round too, as JSON")
      ->check(apps::file_name())
      ->type_name("FILE");
}

}  // namespace

std::optional<Options> parse_options(int argc, char** argv, const std::string& version) {
  Options options;
  CLI::App app(
      "How fast attn is beside what else does the same: a table of peer time / our time (median "
      "and\nleast of interleaved rounds), checked before it is timed.",
      "attn_bench");
  app.get_formatter()->column_width(22);
  app.set_version_flag("--version", version, "Print the versions of attn and LibTorch and exit");
  app.require_subcommand(1);
  for (const auto& command : commands()) {
    auto* sub = app.add_subcommand(command.name, command.description);
    add_threads(*sub, options);
    add_table_options(*sub, options);
    if (sub->get_name() == "attention") {
      sub->add_option("--mode", options.mode, fmt::format("One of {} (forward)", mode_names()))
          ->check(CLI::Validator(check_mode, ""))
          ->type_name("NAME");
    }
  }
  auto* serve = app.add_subcommand(
      "serve", "Time what lines on standard input ask for: our side of peers.py, see serve.h");
  add_threads(*serve, options);
  if (!apps::parse_command_line(app, argc, argv, version)) return std::nullopt;
  options.command = app.get_subcommands().front()->get_name();
  return options;
}

}  // namespace bench
