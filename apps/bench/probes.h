#pragma once

#include "contest.h"

#include <cstddef>
#include <memory>
#include <string>

namespace bench {

/// A loop that measures the machine, on all of LibTorch's threads.
struct Probe {
  Contender contender;
  double units;  ///< flops, exponentials or bytes in one iteration, over all threads
};

/// The floors' three measures. Takes turns in a contest like everyone else, so that a share of the
/// floor is one of the machine as it was in that minute.
class Probes {
 public:
  Probes();

  const std::string& instruction_set() const { return instruction_set_; }

  Probe multiply_add() const;  ///< flops, float32
  Probe exponential() const;   ///< exponentials, float32
  /// Bytes read from memory.
  /// @param bytes Far more than the caches hold.
  static Probe read(size_t bytes);

 private:
  std::string instruction_set_;
};

/// What a piece of work needs at the least.
struct Work {
  double flops = 0.0;  ///< in multiply-adds, two each
  double exponentials = 0.0;
};

/// Units per second.
double rate(const Probe& probe, const Timing& timing);

}  // namespace bench
