#include "serve.h"

#include "machine.h"
#include "support/console.h"
#include "support/program.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <iostream>
#include <map>
#include <sstream>

namespace bench {
namespace {

Served make(const std::string& kind, const std::string& which) {
  if (kind == "generate") return serve_generate(which);
  return kind == "lm" ? serve_lm(which) : serve_module(kind, which);
}

class Server {
 public:
  std::string answer(const std::string& line) {
    std::istringstream words(line);
    std::string verb, kind, which;
    double amount = 0.0;
    words >> verb >> kind >> which;
    const auto& served = find(kind, which);
    if (verb == "check" && served.fingerprint) {
      std::string numbers;
      for (const double number : served.fingerprint()) numbers += fmt::format(" {:.17g}", number);
      return numbers.substr(1);
    }
    if (!(words >> amount) || amount <= 0.0) {
      throw apps::UsageError(fmt::format("a line must end with a number above 0, got {}", line));
    }
    if (verb == "time") {
      return fmt::format("{:.9g}", take_turn(served.contender, static_cast<int64_t>(amount)));
    }
    if (verb == "fill") return fmt::format("{}", iterations_for(served.contender, amount));
    throw apps::UsageError(fmt::format("a line must begin with time, fill or check, got {}", line));
  }

 private:
  const Served& find(const std::string& kind, const std::string& which) {
    const auto key = kind + " " + which;
    auto found = served_.find(key);
    if (found == served_.end()) found = served_.emplace(key, make(kind, which)).first;
    return found->second;
  }

  std::map<std::string, Served> served_;
};

}  // namespace

int serve() {
  const apps::Console console;
  console.print(to_json(look_at_machine()).dump() + "\n");
  Server server;
  for (std::string line; std::getline(std::cin, line);) {
    std::string answer;
    try {
      answer = server.answer(line);
    } catch (const std::exception& error) {
      const std::string text = error.what();
      answer = "error: " + text.substr(0, text.find('\n'));  // LibTorch's have a back-trace below
    }
    console.print(answer + "\n");
  }
  return 0;
}

}  // namespace bench
