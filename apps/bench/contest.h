#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace bench {

/// Something whose time is taken.
struct Contender {
  std::string name;
  std::function<void(int64_t)> repeat;  ///< does its work so many times
  std::function<void()> prepare = {};   ///< before each turn, its time is not taken; may be empty
};

/// How long a contest is.
struct Pace {
  int rounds;
  double turn;  ///< seconds that each contender works in each round, at least
};

/// What a contest found out about one contender.
struct Timing {
  std::string name;
  double first;                ///< seconds of the very first call, which finds everything cold
  int64_t iterations;          ///< in a turn
  std::vector<double> rounds;  ///< seconds for one iteration
};

/// Seconds for one iteration, over a turn of `iterations`.
double take_turn(const Contender& contender, int64_t iterations);

/// Number of iterations that fill a turn of `seconds`. Warms the contender up.
int64_t iterations_for(const Contender& contender, double seconds);

/// Every contender has one turn in each round, in the given order and backwards by turns: what
/// happens to the machine meanwhile happens to all of them.
std::vector<Timing> hold_contest(const std::vector<Contender>& contenders, const Pace& pace);

double median(std::vector<double> values);

}  // namespace bench
