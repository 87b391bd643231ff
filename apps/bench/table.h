#pragma once

#include "contest.h"

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>
#include <vector>

namespace bench {

/// Peer time / our time: above 1 we are faster.
struct Ratio {
  double median;
  double least;
};

struct Row {
  std::string name;
  double seconds;  ///< ours, for one iteration
  double noise;    ///< median of |A / A' - 1|: ours against ours, which should be 0
  std::vector<std::optional<Ratio>> ratios;   ///< one a peer; none where it was left out
  std::vector<std::optional<double>> shares;  ///< one a floor: floor time / our time
  std::vector<Timing> timings;                ///< everything, the probes too
};

enum class Unit { microseconds, per_second };

/// Shapes by peers.
struct Table {
  std::string name;  ///< in the JSON file
  std::string title;
  std::string legend;               ///< what a row's name lists
  std::vector<std::string> peers;   ///< columns
  std::vector<std::string> floors;  ///< columns after them
  Unit unit = Unit::microseconds;   ///< of our own column
  std::vector<Row> rows = {};
};

/// Title and names of the columns.
std::string heading(const Table& table);
std::string line(const Table& table, const Row& row);
/// Geometric mean and least of each column.
std::string summary(const Table& table);
nlohmann::ordered_json to_json(const Table& table);

}  // namespace bench
