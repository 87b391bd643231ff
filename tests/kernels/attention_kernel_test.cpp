// The fused CPU kernels on raw memory, without LibTorch: every instruction set of this machine, any
// number of threads (std::thread here), against loops in double.

#include "kernels/attention.h"
#include "kernels/instruction_set.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

namespace attn::kernels {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Parallel threads(int count) {
  return {count, [](int n, void (*work)(void*, int), void* data) {
            std::vector<std::thread> pool;
            for (int i = 1; i < n; ++i) pool.emplace_back(work, data, i);
            work(data, 0);
            for (auto& thread : pool) thread.join();
          }};
}

const Allocator kAllocator = {
    [](uint64_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); },
    [](void* pointer) { std::free(pointer); }};

struct Shape {
  int64_t B, H, Hkv, T, S, D;
  bool causal = true;
  bool padded = false;
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << "B" << s.B << " H" << s.H << "/" << s.Hkv << " T" << s.T << " S" << s.S << " D" << s.D
       << (s.causal ? " causal" : "") << (s.padded ? " padded" : "");
}

// One attention call on random values: inputs, results, gradients. Heads are [B, H, rows, D], with
// `gap` unused elements after each row, which must stay as they are.
struct Case {
  explicit Case(const Shape& shape_, unsigned seed = 1) : shape(shape_) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto filled = [&](int64_t heads, int64_t rows) {
      std::vector<float> x(shape.B * heads * rows * row());
      for (auto& e : x) e = normal(random);
      return x;
    };
    q = filled(shape.H, shape.T), k = filled(shape.Hkv, shape.S), v = filled(shape.Hkv, shape.S),
    grad_out = filled(shape.H, shape.T);
    out.assign(q.size(), 99.0F), grad_q.assign(q.size(), 99.0F), grad_k.assign(k.size(), 99.0F),
        grad_v.assign(v.size(), 99.0F);
    logsumexp.assign(shape.B * shape.H * shape.T, 99.0F);
    for (int64_t i = 0; i < shape.B * shape.S; ++i) padding.push_back(random() % 3 == 0);
    problem = {shape.B,
               shape.H,
               shape.Hkv,
               shape.T,
               shape.S,
               shape.D,
               1.0F / std::sqrt(static_cast<float>(shape.D)),
               shape.causal};
    if (shape.padded)
      problem.key_padding = reinterpret_cast<const bool*>(padding.data()),
      problem.key_padding_row = shape.S;
  }

  int64_t row() const { return shape.D + gap; }
  Strides strides(int64_t heads, int64_t rows) const {
    return {heads * rows * row(), rows * row(), row()};
  }

  void forward(int thread_count = 1) {
    ForwardArguments<float> a;
    a.problem = problem;
    a.q = {q.data(), strides(shape.H, shape.T)};
    a.k = {k.data(), strides(shape.Hkv, shape.S)}, a.v = {v.data(), a.k.strides};
    a.out = {out.data(), a.q.strides};
    a.logsumexp = logsumexp.data();
    attention_forward(a, threads(thread_count), kAllocator);
  }
  void backward(int thread_count = 1, bool wants_q = true, bool wants_k = true,
                bool wants_v = true) {
    const Strides of_q = strides(shape.H, shape.T), of_k = strides(shape.Hkv, shape.S);
    BackwardArguments<float> a;
    a.problem = problem;
    a.q = {q.data(), of_q}, a.k = {k.data(), of_k}, a.v = {v.data(), of_k};
    a.out = {out.data(), of_q}, a.grad_out = {grad_out.data(), of_q};
    a.logsumexp = logsumexp.data();
    a.grad_q = {grad_q.data(), of_q}, a.grad_k = {grad_k.data(), of_k},
    a.grad_v = {grad_v.data(), of_k};
    a.wants_q = wants_q, a.wants_k = wants_k, a.wants_v = wants_v;
    attention_backward(a, threads(thread_count), kAllocator);
  }

  bool sees(int64_t b, int64_t t, int64_t s) const {
    return (!shape.causal || s <= shape.S - shape.T + t) &&
           !(shape.padded && padding[b * shape.S + s]);
  }

  Shape shape;
  Problem problem;
  int64_t gap = 3;
  std::vector<float> q, k, v, grad_out, out, grad_q, grad_k, grad_v, logsumexp;
  std::vector<char> padding;
};

// The same by loops in double; with dropout, `factor(b, h, t, s)` multiplies each weight.
struct Naive {
  explicit Naive(const Case& c)
      : out(c.q.size()), grad_q(c.q.size()), grad_k(c.k.size()), grad_v(c.v.size()) {
    const Shape& p = c.shape;
    const double scale = c.problem.scale;
    for (int64_t b = 0; b < p.B; ++b) {
      for (int64_t h = 0; h < p.H; ++h) {
        for (int64_t t = 0; t < p.T; ++t) {
          const int64_t at = ((b * p.H + h) * p.T + t) * c.row();
          const auto key_at = [&](int64_t s) {
            return ((b * p.Hkv + h / (p.H / p.Hkv)) * p.S + s) * c.row();
          };
          std::vector<double> weight(p.S), dweight(p.S);
          double greatest = -INFINITY, total = 0.0, delta = 0.0;
          for (int64_t s = 0; s < p.S; ++s) {
            weight[s] = -INFINITY;
            if (!c.sees(b, t, s)) continue;
            weight[s] = 0.0;
            for (int64_t d = 0; d < p.D; ++d) weight[s] += scale * c.q[at + d] * c.k[key_at(s) + d];
            greatest = std::max(greatest, weight[s]);
          }
          if (greatest == -INFINITY) continue;  // sees nothing: zeros
          for (auto& w : weight) total += w = std::exp(w - greatest);
          for (int64_t s = 0; s < p.S; ++s) {
            weight[s] /= total;
            for (int64_t d = 0; d < p.D; ++d) {
              out[at + d] += weight[s] * c.v[key_at(s) + d];
              dweight[s] += static_cast<double>(c.grad_out[at + d]) * c.v[key_at(s) + d];
            }
            delta += weight[s] * dweight[s];
          }
          for (int64_t s = 0; s < p.S; ++s) {
            const double dscore = weight[s] * (dweight[s] - delta) * scale;
            for (int64_t d = 0; d < p.D; ++d) {
              grad_v[key_at(s) + d] += weight[s] * c.grad_out[at + d];
              grad_k[key_at(s) + d] += dscore * c.q[at + d];
              grad_q[at + d] += dscore * c.k[key_at(s) + d];
            }
          }
        }
      }
    }
  }
  std::vector<double> out, grad_q, grad_k, grad_v;
};

// Elements within `bound` of the naive ones relative to the largest of those (at least 0.01), gaps
// untouched. A sum of n products in float32 is within n * 2^-24 of its terms' magnitude in the
// worst case and near sqrt(n) * 2^-24 as a rule; measured here: 8e-7. The bound leaves a factor of
// about 5.
::testing::AssertionResult near(const char* what, const Case& c, const std::vector<float>& actual,
                                const std::vector<double>& expected, double bound = 4e-6) {
  double largest = 0.01, worst = 0.0;
  for (const double e : expected) largest = std::max(largest, std::abs(e));
  for (size_t i = 0; i < actual.size(); ++i) {
    if (static_cast<int64_t>(i) % c.row() >= c.shape.D) {
      if (actual[i] != 99.0F)
        return ::testing::AssertionFailure() << what << ": wrote into the gap at " << i;
      continue;
    }
    const double error = std::abs(actual[i] - expected[i]);
    if (!(error <= bound * largest)) {
      return ::testing::AssertionFailure()
             << what << "[" << i << "]: got " << actual[i] << ", expected " << expected[i]
             << " (largest " << largest << ")";
    }
    worst = std::max(worst, error);
  }
  return ::testing::AssertionSuccess() << what << " within " << worst / largest;
}

// bfloat16: as a Case whose q, k and v are rounded to bfloat16, so that the float32 one beside it
// has the same input.
struct RoundedCase : Case {
  explicit RoundedCase(const Shape& case_shape) : Case(case_shape) {
    for (auto* x : {&q, &k, &v}) {
      for (auto& e : *x) e = to_float(rounded(e));
    }
  }

  static BFloat16 rounded(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    if (std::isnan(x)) return {0x7FC0};
    return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
  }
  static float to_float(BFloat16 x) {
    return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
  }

  void forward_bfloat16(int thread_count) {
    const auto converted = [](const std::vector<float>& x) {
      std::vector<BFloat16> y;
      for (const float e : x) y.push_back(rounded(e));
      return y;
    };
    const auto q_ = converted(q), k_ = converted(k), v_ = converted(v);
    auto out_ = converted(out);
    ForwardArguments<BFloat16> a;
    a.problem = problem;
    a.q = {q_.data(), strides(shape.H, shape.T)};
    a.k = {k_.data(), strides(shape.Hkv, shape.S)}, a.v = {v_.data(), a.k.strides};
    a.out = {out_.data(), a.q.strides};
    a.logsumexp = logsumexp.data();
    attention_forward(a, threads(thread_count), kAllocator);
    for (size_t i = 0; i < out.size(); ++i) out[i] = to_float(out_[i]);
  }
};

// The result is rounded to 8 bits (2^-9), and on AMX so are the weights (2^-9 each at most).
constexpr double kBFloat16Bound = 1.0 / 128;

void expect_naive_bfloat16(const Shape& shape, int thread_count) {
  SCOPED_TRACE(::testing::PrintToString(shape) + " threads " + std::to_string(thread_count));
  RoundedCase c(shape), in_float(shape);
  in_float.forward();
  c.forward_bfloat16(thread_count);
  for (auto& e : c.out) e = e == RoundedCase::to_float(RoundedCase::rounded(99.0F)) ? 99.0F : e;
  EXPECT_TRUE(near("out", c, c.out, Naive(c).out, kBFloat16Bound));
  for (size_t i = 0; i < c.logsumexp.size(); ++i) {
    if (c.logsumexp[i] == in_float.logsumexp[i]) continue;  // -inf
    EXPECT_NEAR(c.logsumexp[i], in_float.logsumexp[i], 2e-5) << i;
  }
}

void expect_naive(const Shape& shape, int thread_count) {
  SCOPED_TRACE(::testing::PrintToString(shape) + " threads " + std::to_string(thread_count));
  Case c(shape);
  c.forward(thread_count);
  c.backward(thread_count);
  const Naive naive(c);
  EXPECT_TRUE(near("out", c, c.out, naive.out));
  EXPECT_TRUE(near("grad_q", c, c.grad_q, naive.grad_q));
  EXPECT_TRUE(near("grad_k", c, c.grad_k, naive.grad_k));
  EXPECT_TRUE(near("grad_v", c, c.grad_v, naive.grad_v));
}

// Every test runs with every instruction set that this machine has, best first.
class AttentionKernel : public ::testing::Test {
 protected:
  template <class Body>
  void with_each_instruction_set(const Body& body) {
    for (const auto& name : instruction_sets()) {
      SCOPED_TRACE(name);
      limit_instruction_set(name);
      EXPECT_EQ(instruction_set(), name);
      body();
    }
    limit_instruction_set(instruction_sets().front());
  }
};

TEST_F(AttentionKernel, EqualsTheNaiveTwinAtBlockEdges) {
  with_each_instruction_set([] {
    for (const int64_t T : {1, 2, 15, 16, 17, 24, 25, 47, 48, 49, 63, 64, 65, 96, 97, 127, 129}) {
      for (const int64_t D : {1, 3, 8, 16, 20, 32, 64, 80}) {
        for (const bool causal : {true, false}) {
          for (const bool padded : {true, false})
            expect_naive({1, 2, 2, T, T, D, causal, padded}, 1 + static_cast<int>((T + D) % 3));
        }
      }
    }
  });
}

TEST_F(AttentionKernel, EqualsTheNaiveTwinForLongAndWideInput) {
  with_each_instruction_set([] {
    for (const int64_t T : {400, 513}) expect_naive({1, 1, 1, T, T, 64}, 2);
    expect_naive({1, 4, 4, 130, 130, 96}, 2);
    expect_naive({1, 1, 1, 50, 50, 128}, 1);
    expect_naive({1, 1, 1, 50, 50, 256}, 1);
    expect_naive({1, 1, 1, 20, 20, 300}, 1);
  });
}

TEST_F(AttentionKernel, AlignsUnequalLengthsAtTheEndAndSharesKeyHeads) {
  with_each_instruction_set([] {
    for (const int64_t T : {1, 3, 50}) {
      for (const int64_t S : {0, 1, 2, 7, 40, 60, 200}) {
        for (const int64_t Hkv : {1, 2, 4}) {
          for (const bool padded : {true, false}) {
            expect_naive({2, 4, Hkv, T, S, 12, true, padded}, 2);
            expect_naive({2, 4, Hkv, T, S, 12, false, padded}, 1);
          }
        }
      }
    }
  });
}

TEST_F(AttentionKernel, EqualsTheNaiveTwinInBFloat16) {
  with_each_instruction_set([] {
    for (const int64_t T : {1, 31, 32, 33, 63, 64, 100, 129}) {
      for (const int64_t D : {7, 16, 33, 64, 80, 100}) {
        for (const bool causal : {true, false})
          expect_naive_bfloat16({1, 2, 1, T, T, D, causal}, 2);
      }
    }
    for (const bool causal : {true, false}) {
      for (const int threads : {1, 2, 3}) {
        expect_naive_bfloat16({3, 4, 2, 70, 70, 40, causal, true}, threads);   // padding
        expect_naive_bfloat16({1, 2, 2, 50, 333, 48, causal}, threads);        // S > T
        expect_naive_bfloat16({1, 3, 1, 160, 90, 64, causal, true}, threads);  // S < T
        expect_naive_bfloat16({1, 1, 1, 300, 300, 64, causal}, threads);
      }
    }
  });
}

TEST_F(AttentionKernel, WhatIsMaskedMayBeNaNInBFloat16) {
  with_each_instruction_set([] {
    for (const int64_t bad : {0, 5, 40, 99}) {
      const Shape shape = {1, 1, 1, 100, 100, 16};
      RoundedCase clean(shape), dirty(shape);
      for (int64_t d = 0; d < 16; ++d) {
        dirty.k[bad * dirty.row() + d] = kNaN;
        dirty.v[bad * dirty.row() + d] = INFINITY;
      }
      clean.forward_bfloat16(2), dirty.forward_bfloat16(2);
      for (int64_t t = 0; t < 100; ++t) {
        if (t >= bad) {
          EXPECT_TRUE(std::isnan(dirty.out[t * dirty.row()])) << "row " << t << " sees " << bad;
        } else {  // to rounding: with a NaN about, another kernel may have computed it
          EXPECT_NEAR(dirty.out[t * dirty.row()], clean.out[t * clean.row()], 0.02) << t;
        }
      }
    }
  });
}

TEST_F(AttentionKernel, SameBitsForAnyNumberOfThreadsInBFloat16) {
  with_each_instruction_set([] {
    for (const Shape& shape : {Shape{3, 5, 5, 70, 70, 24}, Shape{1, 1, 1, 700, 700, 16},
                               Shape{1, 2, 1, 130, 130, 64, false, true}}) {
      RoundedCase one(shape);
      one.forward_bfloat16(1);
      for (const int n : {2, 3, 7}) {
        RoundedCase many(shape);
        many.forward_bfloat16(n);
        EXPECT_EQ(one.out, many.out);
        EXPECT_EQ(one.logsumexp, many.logsumexp);
      }
    }
  });
}

TEST_F(AttentionKernel, SameBitsForAnyNumberOfThreads) {
  with_each_instruction_set([] {
    for (const Shape& shape : {Shape{3, 5, 5, 70, 70, 24}, Shape{1, 1, 1, 700, 700, 16},
                               Shape{1, 2, 2, 130, 130, 64, false, true}}) {
      Case one(shape);
      one.forward(1);
      for (const int n : {2, 3, 7}) {
        Case many(shape);
        many.forward(n);
        EXPECT_EQ(0, std::memcmp(one.out.data(), many.out.data(), one.out.size() * sizeof(float)));
        // The backward's sums depend on the number of threads, but not on their timing.
        Case again(shape);
        again.forward(n);
        many.backward(n), again.backward(n);
        EXPECT_EQ(many.grad_q, again.grad_q);
        EXPECT_EQ(many.grad_k, again.grad_k);
        EXPECT_EQ(many.grad_v, again.grad_v);
      }
    }
  });
}

TEST_F(AttentionKernel, ComputesTheWantedGradientsAlone) {
  with_each_instruction_set([] {
    for (const Shape& shape :
         {Shape{2, 4, 2, 50, 60, 12, true, true}, Shape{1, 1, 1, 300, 300, 8}}) {
      for (const int n : {1, 2}) {
        Case all(shape);
        all.forward(), all.backward(n);
        for (const int wanted : {0, 1, 2, 3, 4, 5, 6}) {
          Case some(shape);
          some.forward(), some.backward(n, (wanted & 1) != 0, (wanted & 2) != 0, (wanted & 4) != 0);
          const auto expect = [&](int bit, const auto& actual, const auto& expected) {
            EXPECT_EQ(actual,
                      (wanted & bit) != 0 ? expected : std::vector<float>(actual.size(), 99.0F));
          };
          expect(1, some.grad_q, all.grad_q);
          expect(2, some.grad_k, all.grad_k);
          expect(4, some.grad_v, all.grad_v);
        }
      }
    }
  });
}

TEST_F(AttentionKernel, WhatIsMaskedMayBeNaN) {
  with_each_instruction_set([] {
    for (const int64_t D : {8, 64, 80}) {
      for (const int64_t bad : {0, 5, 17, 52, 99}) {
        const Shape shape = {1, 1, 1, 100, 100, D};
        Case clean(shape), dirty(shape);
        for (int64_t d = 0; d < D; ++d) {
          dirty.k[bad * dirty.row() + d] = kNaN;
          dirty.v[bad * dirty.row() + d] = INFINITY;
        }
        clean.forward(), dirty.forward();
        for (int64_t t = 0; t < 100; ++t) {
          const float a = clean.out[t * clean.row()], b = dirty.out[t * clean.row()];
          if (t < bad) {
            EXPECT_EQ(a, b) << "row " << t << " sees nothing of " << bad;
          } else {
            EXPECT_TRUE(std::isnan(b)) << "row " << t << " sees " << bad;
          }
        }
      }
      // Padding: nobody sees it.
      const Shape shape = {1, 1, 1, 60, 60, D, false, true};
      Case clean(shape), dirty(shape);
      for (int64_t s = 0; s < 60; ++s) {
        if (!dirty.padding[s]) continue;
        for (int64_t d = 0; d < D; ++d)
          dirty.k[s * dirty.row() + d] = dirty.v[s * dirty.row() + d] = kNaN;
      }
      clean.forward(), dirty.forward();
      clean.backward(), dirty.backward();
      EXPECT_EQ(clean.out, dirty.out);
      EXPECT_EQ(clean.grad_q, dirty.grad_q);
      EXPECT_EQ(clean.grad_k, dirty.grad_k);
    }
  });
}

TEST_F(AttentionKernel, LargeScoresStayFinite) {
  with_each_instruction_set([] {
    Case c({1, 1, 1, 40, 40, 16});
    for (auto& e : c.q) e *= 1e4F;
    c.forward(), c.backward();
    for (const auto* x : {&c.out, &c.grad_q, &c.grad_k, &c.grad_v}) {
      for (const float e : *x) EXPECT_TRUE(std::isfinite(e));
    }
  });
}

TEST_F(AttentionKernel, AQueryThatSeesOneKeyHasNoScoreGradient) {
  with_each_instruction_set([] {
    for (const int64_t D : {1, 8, 64, 100}) {
      Case c({2, 3, 3, 1, 1, D});
      c.forward(), c.backward();
      for (int64_t i = 0; i < 2 * 3; ++i) {
        for (int64_t d = 0; d < D; ++d) {
          EXPECT_EQ(c.out[i * c.row() + d], c.v[i * c.row() + d]);
          EXPECT_EQ(c.grad_q[i * c.row() + d], 0.0F);
          EXPECT_EQ(c.grad_k[i * c.row() + d], 0.0F);
          EXPECT_EQ(c.grad_v[i * c.row() + d], c.grad_out[i * c.row() + d]);
        }
      }
    }
  });
}

TEST_F(AttentionKernel, DropoutMaskIsTheSameEverywhereAndRight) {
  // Equal scores, so that every kept weight of row t is factor / (t + 1); values are the unit
  // vectors, so that the output is the row of weights.
  const int64_t T = 64;
  std::vector<float> first;
  with_each_instruction_set([&] {
    for (const int thread_count : {1, 3}) {
      Case c({2, 2, 2, T, T, T});
      c.problem.dropout_p = 0.25F;
      c.problem.dropout_seed = 1234567890123ULL;
      std::fill(c.q.begin(), c.q.end(), 0.0F);
      for (int64_t i = 0; i < 2 * 2 * T; ++i) {
        for (int64_t d = 0; d < T; ++d) c.v[i * c.row() + d] = i % T == d ? 1.0F : 0.0F;
      }
      c.forward(thread_count);
      int64_t kept = 0, of = 0;
      for (int64_t i = 0; i < 2 * 2 * T; ++i) {
        for (int64_t s = 0; s <= i % T; ++s) {
          const float weight = c.out[i * c.row() + s];
          kept += weight != 0.0F, ++of;
          if (weight != 0.0F) {
            EXPECT_NEAR(weight, 1.0F / 0.75F / static_cast<float>(i % T + 1), 1e-6F);
          }
        }
      }
      // 8320 draws: the standard deviation of the share is 0.0047.
      EXPECT_NEAR(static_cast<double>(kept) / of, 0.75, 0.02);
      std::vector<float> mask;
      for (const float w : c.out) mask.push_back(w != 0.0F);
      if (first.empty()) first = mask;
      EXPECT_EQ(first, mask);
    }
  });
}

TEST_F(AttentionKernel, DropoutGradientsUseTheForwardsMask) {
  // d(sum out)/dv[s] = sum of the dropped weights of column s, which a forward with v = unit
  // vectors shows.
  with_each_instruction_set([] {
    const int64_t T = 50;
    Case weights({1, 2, 2, T, T, T}), c({1, 2, 2, T, T, T});
    for (auto* x : {&weights, &c}) x->problem.dropout_p = 0.4F, x->problem.dropout_seed = 77;
    weights.q = c.q, weights.k = c.k;
    for (int64_t i = 0; i < 2 * T; ++i) {
      for (int64_t d = 0; d < T; ++d) weights.v[i * c.row() + d] = i % T == d ? 1.0F : 0.0F;
    }
    std::fill(c.grad_out.begin(), c.grad_out.end(), 1.0F);
    weights.forward(), c.forward(), c.backward();
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t s = 0; s < T; ++s) {
        double column = 0.0;
        for (int64_t t = 0; t < T; ++t) column += weights.out[(h * T + t) * c.row() + s];
        for (int64_t d = 0; d < T; ++d)
          EXPECT_NEAR(c.grad_v[(h * T + s) * c.row() + d], column, 1e-5);
      }
    }
    // grad_q along a random direction against a central difference, in float: 1e-2.
    Case up = c, down = c;
    double directional = 0.0, difference = 0.0;
    for (size_t i = 0; i < c.q.size(); ++i) {
      if (static_cast<int64_t>(i) % c.row() >= c.shape.D) continue;
      const float step = 1e-2F * std::sin(static_cast<float>(i));
      up.q[i] += step, down.q[i] -= step;
      directional += 2.0 * step * c.grad_q[i];
    }
    up.forward(), down.forward();
    for (size_t i = 0; i < c.out.size(); ++i)
      difference += static_cast<double>(up.out[i]) - down.out[i];
    EXPECT_NEAR(directional, difference, 2e-2 * std::abs(difference) + 1e-3);
  });
}

}  // namespace
}  // namespace attn::kernels
