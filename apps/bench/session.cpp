#include "session.h"

#include "support/files.h"
#include "support/program.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace bench {
namespace {

// 10 ms: a clock tick, an interrupt or a page fault then changes little. 9 rounds: their median
// stands two disturbed ones on either side.
constexpr Pace kThorough{.rounds = 9, .turn = 0.010};
constexpr Pace kQuick{.rounds = 3, .turn = 0.001};

// Above, two-thread figures can't be trusted.
constexpr double kBusyLoad = 0.5;
constexpr double kBusyShare = 0.05;

// More than the last-level caches of one core's share of a server; a quick run saves the time.
constexpr size_t kReadBytes = size_t{1} << 29;
constexpr size_t kQuickReadBytes = size_t{1} << 26;

// `ours` is entered twice, as the first and the last: both are one side, and their difference is
// the noise.
std::vector<double> our_seconds(const Timing& a, const Timing& b) {
  std::vector<double> seconds;
  for (size_t r = 0; r < a.rounds.size(); ++r) {
    seconds.push_back(0.5 * (a.rounds[r] + b.rounds[r]));
  }
  return seconds;
}

double noise_of(const Timing& a, const Timing& b) {
  std::vector<double> differences;
  for (size_t r = 0; r < a.rounds.size(); ++r) {
    differences.push_back(std::abs(a.rounds[r] / b.rounds[r] - 1.0));
  }
  return median(differences);
}

Ratio ratio_of(const Timing& peer, const std::vector<double>& ours) {
  std::vector<double> ratios;
  for (size_t r = 0; r < ours.size(); ++r) ratios.push_back(peer.rounds[r] / ours[r]);
  return {median(ratios), *std::min_element(ratios.begin(), ratios.end())};
}

}  // namespace

Session::Session(const Options& options, const apps::Console& console)
    : options_(options),
      console_(console),
      pace_(options.quick ? kQuick : kThorough),
      machine_(look_at_machine()) {
  console_.print(describe(machine_) + "\n");
  auto settings = fmt::format("{} rounds, turns of {} ms", pace_.rounds, pace_.turn * 1e3);
  for (const auto& [name, value] : machine_.environment) {
    settings += fmt::format("; {}={}", name, value);
  }
  console_.print(settings + "\n");
  probe(probes_.multiply_add(), "multiply_add_flops", 1e9, "GFLOP/s multiply-add");
  probe(probes_.exponential(), "exponentials", 1e9, "G exp/s");
  probe(Probes::read(options.quick ? kQuickReadBytes : kReadBytes), "read_bytes", 1e9, "GB/s read");
  console_.print(fmt::format("load average {:.2f}\n", machine_.load));
  if (machine_.load > kBusyLoad) {
    console_.print(
        console_.styled("warning: the machine is busy; figures may be off\n", apps::Style::bad));
  }
}

void Session::probe(const Probe& probe, const char* name, double scale, const char* unit) {
  const double per_second = rate(probe, hold_contest({probe.contender}, pace_).front());
  console_.print(
      fmt::format("probe ({}): {:.1f} {}\n", probes_.instruction_set(), per_second / scale, unit));
  rates_.emplace_back(name, per_second);
}

void Session::begin(const Table& head) {
  tables_.push_back(head);
}

void Session::add(const Entry& entry) {
  auto& table = tables_.back();
  if (table.rows.empty()) console_.print(heading(table));

  std::vector<Contender> contenders = {entry.ours};
  const auto enter = [&contenders](const std::optional<Contender>& contender) {
    if (contender) contenders.push_back(*contender);
    return contenders.size() - 1;
  };
  std::vector<size_t> peers;
  for (const auto& peer : entry.peers) peers.push_back(enter(peer));
  std::vector<size_t> besides;
  for (const auto& floor : entry.floors) {
    besides.push_back(enter(floor ? floor->beside : std::nullopt));
  }
  const auto multiply_add = probes_.multiply_add();
  const auto exponential = probes_.exponential();
  const auto first_probe = contenders.size();
  if (!entry.floors.empty()) {
    contenders.push_back(multiply_add.contender);
    contenders.push_back(exponential.contender);
  }
  contenders.push_back(entry.ours);
  contenders.back().name += " again";

  Row row;
  row.name = entry.name;
  row.timings = hold_contest(contenders, pace_);
  const auto ours = our_seconds(row.timings.front(), row.timings.back());
  row.seconds = median(ours);
  row.noise = noise_of(row.timings.front(), row.timings.back());
  for (size_t i = 0; i < peers.size(); ++i) {
    row.ratios.push_back(entry.peers[i] ? std::optional(ratio_of(row.timings[peers[i]], ours))
                                        : std::nullopt);
  }
  for (size_t i = 0; i < entry.floors.size(); ++i) {
    const auto& floor = entry.floors[i];
    row.shares.push_back(std::nullopt);
    if (!floor) continue;
    const double least = floor->work.flops / rate(multiply_add, row.timings[first_probe]) +
                         floor->work.exponentials / rate(exponential, row.timings[first_probe + 1]);
    const double beside = floor->beside ? median(row.timings[besides[i]].rounds) : 0.0;
    row.shares.back() = least / (row.seconds - beside);
  }
  console_.print(line(table, row));
  table.rows.push_back(row);
}

void Session::end() {
  const auto& table = tables_.back();
  if (table.rows.empty()) {
    tables_.pop_back();
  } else {
    console_.print(summary(table));
  }
}

void Session::finish() {
  if (tables_.empty()) {
    throw apps::UsageError(
        fmt::format("--filter must be a part of a row's name, got {}", options_.filter));
  }
  const auto others = bystanders_.share();
  if (others) {
    const auto text =
        fmt::format("\nother processes took {:.1f} % of the cores meanwhile\n", *others * 100);
    console_.print(*others > kBusyShare ? console_.styled(text, apps::Style::bad) : text);
  }
  if (options_.json.empty()) return;
  auto json = nlohmann::ordered_json{{"machine", to_json(machine_)},
                                     {"rounds", pace_.rounds},
                                     {"turn_seconds", pace_.turn},
                                     {"probe_instruction_set", probes_.instruction_set()}};
  for (const auto& [name, per_second] : rates_) json["probes_per_second"][name] = per_second;
  json["other_processes_share"] = others ? nlohmann::ordered_json(*others) : nullptr;
  for (const auto& table : tables_) json["tables"].push_back(to_json(table));
  apps::write_file(options_.json, json.dump(2) + "\n");
}

}  // namespace bench
