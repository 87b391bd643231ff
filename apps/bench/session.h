#pragma once

#include "contest.h"
#include "machine.h"
#include "options.h"
#include "probes.h"
#include "support/console.h"
#include "table.h"

#include <optional>
#include <string>
#include <vector>

namespace bench {

/// The least time that a row's work needs, by the probes' rates.
struct Floor {
  Work work;
  /// Something we do beside `work`, whose time is to be taken off ours.
  std::optional<Contender> beside = std::nullopt;
};

/// What is measured for a row of a table.
struct Entry {
  std::string name;
  Contender ours;
  std::vector<std::optional<Contender>> peers;  ///< one a column; none = left out
  std::vector<std::optional<Floor>> floors;     ///< one a column; none = unknown
};

/// One run of the program: measures rows, prints them as they come, keeps them for --json.
class Session {
 public:
  /// Prints the machine and the settings, and a warning when the machine is busy.
  Session(const Options& options, const apps::Console& console);

  const Options& options() const { return options_; }
  /// Has --filter nothing against this row?
  bool wants(const std::string& row) const { return row.find(options_.filter) != row.npos; }

  /// Starts a table; it is printed from its first row on.
  void begin(const Table& head);
  void add(const Entry& entry);
  /// Ends it with its summary.
  void end();

  /// Prints what other processes did meanwhile, and writes the file that --json asks for.
  /// @throws apps::UsageError if --filter left no row.
  void finish();

 private:
  void probe(const Probe& probe, const char* name, double scale, const char* unit);

  const Options& options_;
  const apps::Console& console_;
  Pace pace_;
  Machine machine_;
  Bystanders bystanders_;
  Probes probes_;
  std::vector<std::pair<std::string, double>> rates_;  ///< at the start, per second
  std::vector<Table> tables_;
};

}  // namespace bench
