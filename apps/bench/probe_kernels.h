#pragma once

// What one core can do at its best: loops that do one thing and nothing else. No LibTorch here.

#include <cstdint>
#include <string>

namespace bench::probe {

/// The best code for this machine, of the instruction sets that LibTorch may use as well.
struct Kernels {
  std::string instruction_set;
  int64_t flops_in_a_step;

  /// float32 multiply-adds in registers, on independent sums; returns a value that depends on all.
  float (*multiply_add)(int64_t steps, float start);
  /// 2^x for each x <= 0, as attention needs it.
  void (*exponentials)(const float* x, float* to, int64_t count);
  /// Sum of the data, read once.
  float (*read)(const float* data, int64_t count);
};

/// `capability` is LibTorch's name of the instruction set: AVX512, AVX2, DEFAULT; others choose
/// freely.
Kernels kernels(const std::string& capability);

}  // namespace bench::probe
