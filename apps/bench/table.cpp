#include "table.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace bench {
namespace {

constexpr int kName = 18, kOurs = 11, kPeer = 16, kFloor = 10, kNoise = 8;

// Three digits, whatever the size.
std::string number(double value) {
  if (value >= 99.95) return fmt::format("{:.0f}", value);
  if (value >= 9.995) return fmt::format("{:.1f}", value);
  return fmt::format("{:.2f}", value);
}

std::string cell(const std::optional<Ratio>& ratio) {
  return ratio ? fmt::format("{} ({})", number(ratio->median), number(ratio->least)) : "-";
}

// Of one column, over the rows' medians.
std::optional<Ratio> mean_and_least(const Table& table, size_t peer) {
  double logarithms = 0.0;
  double least = INFINITY;
  int count = 0;
  for (const auto& row : table.rows) {
    if (!row.ratios[peer]) continue;
    logarithms += std::log(row.ratios[peer]->median);
    least = std::min(least, row.ratios[peer]->median);
    ++count;
  }
  if (count == 0) return std::nullopt;
  return Ratio{std::exp(logarithms / count), least};
}

double in_unit(const Table& table, double seconds) {
  return table.unit == Unit::microseconds ? seconds * 1e6 : 1.0 / seconds;
}

}  // namespace

std::string heading(const Table& table) {
  auto text = fmt::format(
      "\n{}: peer time / our time, median (least of the rounds)\n\n{:<{}}{:>{}}", table.title,
      table.legend, kName, table.unit == Unit::microseconds ? "ours, us" : "ours, 1/s", kOurs);
  for (const auto& peer : table.peers) text += fmt::format("{:>{}}", peer, kPeer);
  for (const auto& floor : table.floors) text += fmt::format("{:>{}}", floor, kFloor);
  return text + fmt::format("{:>{}}\n", "A/A", kNoise);
}

std::string line(const Table& table, const Row& row) {
  auto text =
      fmt::format("{:<{}}{:>{}}", row.name, kName, number(in_unit(table, row.seconds)), kOurs);
  for (const auto& ratio : row.ratios) text += fmt::format("{:>{}}", cell(ratio), kPeer);
  for (const auto& share : row.shares) {
    text += fmt::format("{:>{}}", share ? fmt::format("{:.0f} %", *share * 100) : "-", kFloor);
  }
  return text + fmt::format("{:>{}}\n", fmt::format("{:.1f} %", row.noise * 100), kNoise);
}

std::string summary(const Table& table) {
  auto means = fmt::format("{:<{}}", "geometric mean", kName + kOurs);
  auto leasts = fmt::format("{:<{}}", "least", kName + kOurs);
  for (size_t peer = 0; peer < table.peers.size(); ++peer) {
    const auto both = mean_and_least(table, peer);
    means += fmt::format("{:>{}}", both ? number(both->median) : "-", kPeer);
    leasts += fmt::format("{:>{}}", both ? number(both->least) : "-", kPeer);
  }
  return means + '\n' + leasts + '\n';
}

nlohmann::ordered_json to_json(const Table& table) {
  using Json = nlohmann::ordered_json;
  auto rows = Json::array();
  for (const auto& row : table.rows) {
    Json json = {{"name", row.name}, {"our_seconds", row.seconds}, {"noise", row.noise}};
    for (size_t i = 0; i < table.peers.size(); ++i) {
      if (!row.ratios[i]) continue;
      json["peers"][table.peers[i]] = {{"median", row.ratios[i]->median},
                                       {"least", row.ratios[i]->least}};
    }
    for (size_t i = 0; i < table.floors.size(); ++i) {
      if (row.shares[i]) json["shares"][table.floors[i]] = *row.shares[i];
    }
    for (const auto& timing : row.timings) {
      json["timings"].push_back({{"name", timing.name},
                                 {"first", timing.first},
                                 {"iterations", timing.iterations},
                                 {"rounds", timing.rounds}});
    }
    rows.push_back(json);
  }
  Json json = {{"name", table.name}, {"title", table.title}, {"rows", rows}};
  for (size_t i = 0; i < table.peers.size(); ++i) {
    const auto both = mean_and_least(table, i);
    if (!both) continue;
    json["geometric_mean"][table.peers[i]] = both->median;
    json["least"][table.peers[i]] = both->least;
  }
  return json;
}

}  // namespace bench
