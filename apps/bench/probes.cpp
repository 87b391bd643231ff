// Compiled with OpenMP: at::parallel_for is a header template that runs serially without it.

#include "probes.h"

#include "probe_kernels.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <atomic>
#include <vector>

namespace bench {
namespace {

const probe::Kernels& kernels() {
  static const auto chosen = probe::kernels(at::get_cpu_capability());
  return chosen;
}

template <class Work>
void on_every_thread(const Work& work) {
  const int64_t threads = at::get_num_threads();
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) work(i);
  });
}

double thread_count() {
  return at::get_num_threads();
}

// A result that nobody asks for could be left out by the compiler.
void keep(float value) {
  static std::atomic<float> sink;
  sink.store(value, std::memory_order_relaxed);
}

}  // namespace

Probes::Probes() : instruction_set_(kernels().instruction_set) {}

Probe Probes::multiply_add() const {
  constexpr int64_t kSteps = 1000;
  const auto repeat = [](int64_t iterations) {
    on_every_thread([&](int64_t thread) {
      keep(kernels().multiply_add(iterations * kSteps, 1.0F + static_cast<float>(thread)));
    });
  };
  return {{"multiply-add", repeat},
          static_cast<double>(kSteps * kernels().flops_in_a_step) * thread_count()};
}

Probe Probes::exponential() const {
  constexpr int64_t kCount = 2048;  // in and out, 16 KiB: half of the smallest first-level cache
  const auto repeat = [](int64_t iterations) {
    on_every_thread([&](int64_t thread) {
      std::vector<float> x(kCount);
      std::vector<float> to(kCount);
      for (int64_t i = 0; i < kCount; ++i) {
        x[static_cast<size_t>(i)] = -0.01F * static_cast<float>((i * 37 + thread) % 1500);
      }
      for (int64_t i = 0; i < iterations; ++i) {
        kernels().exponentials(x.data(), to.data(), kCount);
        keep(to[static_cast<size_t>(i % kCount)]);
      }
    });
  };
  return {{"exponential", repeat}, static_cast<double>(kCount) * thread_count()};
}

Probe Probes::read(size_t bytes) {
  const auto count = static_cast<int64_t>(bytes / sizeof(float));
  const std::shared_ptr<float[]> data(new float[static_cast<size_t>(count)]);
  // The number of threads is asked for outside: within a parallel region it is another one.
  const auto part = [count, threads = int64_t{at::get_num_threads()}](int64_t thread) {
    return count * thread / threads;
  };
  on_every_thread([&](int64_t thread) {  // who reads a page has touched it first
    for (int64_t i = part(thread); i < part(thread + 1); ++i) {
      data[static_cast<size_t>(i)] = static_cast<float>(i % 251);
    }
  });
  const auto repeat = [data, part](int64_t iterations) {
    on_every_thread([&](int64_t thread) {
      for (int64_t i = 0; i < iterations; ++i) {
        keep(kernels().read(data.get() + part(thread), part(thread + 1) - part(thread)));
      }
    });
  };
  return {{"read", repeat}, static_cast<double>(count) * sizeof(float)};
}

double rate(const Probe& probe, const Timing& timing) {
  return probe.units / median(timing.rounds);
}

}  // namespace bench
