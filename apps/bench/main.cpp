// attn_bench: how fast attn is beside its peers, in tables that anyone can make again. See --help.

#include "commands.h"
#include "machine.h"
#include "options.h"
#include "serve.h"
#include "session.h"
#include "support/console.h"
#include "support/files.h"
#include "support/program.h"

#include <algorithm>

namespace {

int run(const bench::Options& options) {
  if (!options.json.empty()) apps::check_writable(options.json);
  bench::use_threads(options.threads);
  if (options.command == "serve") return bench::serve();

  const apps::Console console;
  bench::Session session(options, console);
  const auto& all = bench::commands();
  const auto command = std::find_if(all.begin(), all.end(), [&](const bench::Command& candidate) {
    return candidate.name == options.command;
  });
  command->run(session);
  session.finish();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return apps::run_program("attn_bench", [&] {
    const auto options = bench::parse_options(argc, argv, bench::versions());
    return options ? run(*options) : 0;
  });
}
