#include "machine.h"

#include <attn/version.h>

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>

namespace bench {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

double load_average() {
  double load = 0.0;
  return getloadavg(&load, 1) == 1 ? load : 0.0;
}

// Seconds that all cores together were busy, stolen time included.
std::optional<double> busy_seconds() {
  std::ifstream file("/proc/stat");
  std::string name;
  double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, irq = 0, softirq = 0, stolen = 0;
  file >> name >> user >> nice >> system >> idle >> waiting >> irq >> softirq >> stolen;
  if (!file || name != "cpu") return std::nullopt;
  return (user + nice + system + irq + softirq + stolen) /
         static_cast<double>(sysconf(_SC_CLK_TCK));
}

double own_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

std::string versions() {
  return fmt::format("attn {}, LibTorch {}", attn::version(), TORCH_VERSION);
}

void use_threads(const std::optional<int64_t>& threads) {
  if (threads) at::set_num_threads(static_cast<int>(*threads));
}

Machine look_at_machine() {
  Machine machine{cpu_model(),           std::thread::hardware_concurrency(),
                  at::get_num_threads(), at::get_cpu_capability(),
                  load_average(),        {}};
  for (const char* name :
       {"ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA",
        "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY",
        "OMP_PROC_BIND", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD"}) {
    if (const char* value = std::getenv(name)) machine.environment.emplace_back(name, value);
  }
  return machine;
}

std::string describe(const Machine& machine) {
  return fmt::format("{} ({}); {}, {} thread{} on {} core{}", versions(), machine.instruction_set,
                     machine.cpu, machine.threads, machine.threads == 1 ? "" : "s", machine.cores,
                     machine.cores == 1 ? "" : "s");
}

nlohmann::ordered_json to_json(const Machine& machine) {
  nlohmann::ordered_json json = {{"attn", attn::version()},
                                 {"libtorch", TORCH_VERSION},
                                 {"instruction_set", machine.instruction_set},
                                 {"cpu", machine.cpu},
                                 {"cores", machine.cores},
                                 {"threads", machine.threads},
                                 {"load", machine.load},
                                 {"environment", nlohmann::ordered_json::object()}};
  for (const auto& [name, value] : machine.environment) json["environment"][name] = value;
  return json;
}

Bystanders::Bystanders()
    : begin_(std::chrono::steady_clock::now()), busy_(busy_seconds()), own_(own_seconds()) {}

std::optional<double> Bystanders::share() const {
  const auto busy = busy_seconds();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin_;
  const auto cores = std::thread::hardware_concurrency();
  // The kernel counts in hundredths of a second.
  if (!busy || !busy_ || cores == 0 || elapsed.count() < 0.5) return std::nullopt;
  const double others = (*busy - *busy_) - (own_seconds() - own_);
  return std::max(0.0, others / (elapsed.count() * cores));
}

}  // namespace bench
