#pragma once

#include <nlohmann/json_fwd.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bench {

/// "attn 0.1.0, LibTorch 2.15.0"
std::string versions();

/// Sets LibTorch's number of threads, when one is given.
void use_threads(const std::optional<int64_t>& threads);

/// Where and with what settings this process computes.
struct Machine {
  std::string cpu;
  unsigned cores;
  int threads;
  std::string instruction_set;                                   ///< of LibTorch's kernels
  double load;                                                   ///< average of the last minute
  std::vector<std::pair<std::string, std::string>> environment;  ///< variables that change speed
};

Machine look_at_machine();
/// One line.
std::string describe(const Machine& machine);
nlohmann::ordered_json to_json(const Machine& machine);

/// How much of the machine others use.
class Bystanders {
 public:
  Bystanders();
  /// Share of all cores that other processes took since construction; none where it can't be told.
  std::optional<double> share() const;

 private:
  std::chrono::steady_clock::time_point begin_;
  std::optional<double> busy_;
  double own_;
};

}  // namespace bench
