#include "contest.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace bench {

double take_turn(const Contender& contender, int64_t iterations) {
  if (contender.prepare) contender.prepare();
  const auto begin = std::chrono::steady_clock::now();
  contender.repeat(iterations);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  return seconds.count() / static_cast<double>(iterations);
}

int64_t iterations_for(const Contender& contender, double seconds) {
  int64_t iterations = 1;
  while (true) {
    // The faster of two: one that was interrupted would make the turns too short.
    const double fastest =
        std::min(take_turn(contender, iterations), take_turn(contender, iterations));
    const double taken = fastest * static_cast<double>(iterations);
    if (taken >= seconds) return iterations;
    // A tenth more than it takes, as the next turn may be faster; a first estimate may be far off.
    const double factor = std::clamp(1.1 * seconds / std::max(taken, 1e-9), 1.1, 100.0);
    iterations = static_cast<int64_t>(std::ceil(static_cast<double>(iterations) * factor));
  }
}

std::vector<Timing> hold_contest(const std::vector<Contender>& contenders, const Pace& pace) {
  std::vector<Timing> timings;
  for (const auto& contender : contenders) {
    const double first = take_turn(contender, 1);
    timings.push_back({contender.name, first, iterations_for(contender, pace.turn), {}});
  }
  const size_t count = contenders.size();
  for (int round = 0; round < pace.rounds; ++round) {
    for (size_t turn = 0; turn < count; ++turn) {
      const size_t i = round % 2 == 0 ? turn : count - 1 - turn;
      timings[i].rounds.push_back(take_turn(contenders[i], timings[i].iterations));
    }
  }
  return timings;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : 0.5 * (values[half - 1] + values[half]);
}

}  // namespace bench
