// A small self-attention module in one call: projection, attention and output projection of a few
// batch elements after one another, by one thread. At the sizes of the seeds LibTorch's own linear
// takes 2.5 to 20 us where its arithmetic takes under 1, and each of three parallel regions waits
// for its threads.
//
// A unit of work is a group of batch elements with about 48 tokens in all:
//   qkv [tokens][3C]   the projection; both linears are score tiles (8 tokens x 3 vectors of
//                      outputs), with the weights transposed once a thread into panels [C][48]
//   y   [tokens][C]    the attention of every head, by forward-inl.h
// Units write disjoint rows of the output, and a row's arithmetic does not depend on its unit:
// results are bit-equal for any number of threads.

#include "kernels/attention.h"
#include "kernels/schedule.h"

// Highway includes this file again from here, once per instruction set.
// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/module_forward.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
#include "kernels/forward-inl.h"
// clang-format on

#ifndef ATTN_KERNELS_MODULE_PLAN_
#define ATTN_KERNELS_MODULE_PLAN_
namespace attn::kernels {

/// What a call decided before its workers start.
struct ModulePlan {
  const ModuleArguments* arguments;
  const Allocator* allocator;
  Dealer* dealer;
  int64_t group;  ///< batch elements in a unit
};

}  // namespace attn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace attn::kernels::HWY_NAMESPACE {
namespace {

constexpr size_t kPanel = kQueries;  // outputs side by side: 3 vectors of AVX-512, 6 of AVX2

// y = x · weightᵀ + bias over rows of x, with the weight packed for this thread.
class Linear {
 public:
  Linear(const Projection& projection, size_t in, size_t out)
      : projection_(projection), in_(in), out_(out), panels_((out + kPanel - 1) / kPanel) {}

  size_t floats() const { return panels_ * kPanel * (in_ + 1); }

  HWY_ATTR void Pack(float* to) {
    panel_ = to;
    bias_ = to + panels_ * kPanel * in_;
    for (size_t n = 0; n < panels_ * kPanel; ++n)
      bias_[n] = n < out_ && projection_.bias != nullptr ? projection_.bias[n] : 0.0F;
    const auto row = static_cast<size_t>(projection_.row);
    for (size_t n = 0; n < out_; n += kLanes) {
      PackColumns(projection_.weight + n * row, row, std::min<size_t>(kLanes, out_ - n), in_, 1.0F,
                  panel_ + n / kPanel * kPanel * in_ + n % kPanel);
    }
  }

  // `rows` rows of x, x_row apart, to rows of y, y_row apart.
  HWY_ATTR void Apply(const float* x, size_t x_row, size_t rows, float* y, size_t y_row) const {
    for (size_t n0 = 0; n0 < out_; n0 += kPanel) {
      const size_t vectors = (std::min(kPanel, out_ - n0) + kLanes - 1) / kLanes;
      for (size_t j = 0; j < vectors; j += kScoreVectors) {
        const size_t n = n0 + j * kLanes;
        const float* panel = panel_ + n0 * in_ + j * kLanes;
        switch (std::min<size_t>(kScoreVectors, vectors - j)) {
          case 1:
            Rows<1>(x, x_row, rows, panel, n, y, y_row);
            break;
          case 2:
            Rows<std::min(2, kScoreVectors)>(x, x_row, rows, panel, n, y, y_row);
            break;
          case 3:
            Rows<std::min(3, kScoreVectors)>(x, x_row, rows, panel, n, y, y_row);
            break;
          default:
            Rows<std::min(4, kScoreVectors)>(x, x_row, rows, panel, n, y, y_row);
        }
      }
    }
  }

 private:
  template <int kVectors>
  HWY_NOINLINE HWY_ATTR void Rows(const float* x, size_t x_row, size_t rows, const float* panel,
                                  size_t n, float* y, size_t y_row) const {
    size_t r = 0;
    for (; r + kScoreRows <= rows; r += kScoreRows)
      Tile<kScoreRows, kVectors>(x + r * x_row, x_row, panel, n, y + r * y_row, y_row);
    if constexpr (kScoreRows > 4) {
      if (r + 4 <= rows)
        Tile<4, kVectors>(x + r * x_row, x_row, panel, n, y + r * y_row, y_row), r += 4;
    }
    for (; r < rows; ++r) Tile<1, kVectors>(x + r * x_row, x_row, panel, n, y + r * y_row, y_row);
  }

  template <int kRows, int kVectors>
  HWY_INLINE void Tile(const float* x, size_t x_row, const float* panel, size_t n, float* y,
                       size_t y_row) const {
    const DF d;
    ScoreTile<kRows, kVectors>(x, x_row, panel, in_, [&](int i, int c, VF sum) HWY_ATTR {
      const size_t at = n + static_cast<size_t>(c) * kLanes;
      sum = hn::Add(sum, hn::Load(d, bias_ + at));
      if (at + kLanes <= out_) {
        hn::StoreU(sum, d, y + i * y_row + at);
      } else {
        StoreFirst(sum, out_ - at, y + i * y_row + at);
      }
    });
  }

  const Projection& projection_;
  size_t in_;
  size_t out_;
  size_t panels_;
  float* panel_ = nullptr;  // [panels][in][kPanel]
  float* bias_ = nullptr;
};

HWY_ATTR void Work(void* data, int index) {
  const auto& plan = *static_cast<const ModulePlan*>(data);
  const ModuleArguments& a = *plan.arguments;
  const Problem& p = a.problem;
  const auto C = static_cast<size_t>(p.H * p.D);
  const auto T_ = static_cast<size_t>(p.T);
  const size_t tokens = static_cast<size_t>(plan.group) * T_;
  Linear qkv(a.qkv, C, 3 * C), proj(a.proj, C, C);
  const size_t floats = qkv.floats() + proj.floats() + RoundUp(tokens * 3 * C, 16) + tokens * C;
  constexpr size_t kSmall = 4096;
  HWY_ALIGN float small[kSmall];
  float* allocated = nullptr;
  if (floats > kSmall)
    allocated = static_cast<float*>(plan.allocator->allocate(floats * sizeof(float)));
  float* const packed = allocated != nullptr ? allocated : small;
  float* const projected = packed + qkv.floats() + proj.floats();  // [tokens][3C]
  float* const mixed = projected + RoundUp(tokens * 3 * C, 16);    // [tokens][C]
  qkv.Pack(packed);
  proj.Pack(packed + qkv.floats());

  ForwardArguments<float> attention;
  attention.problem = p;
  attention.problem.B = 1;
  const auto heads = [&](auto* start, size_t row) {
    return Heads<std::remove_pointer_t<decltype(start)>>{
        start, {p.T * static_cast<int64_t>(row), p.D, static_cast<int64_t>(row)}};
  };
  const float* const start = projected;
  attention.q = heads(start, 3 * C);
  attention.k = heads(start + C, 3 * C);
  attention.v = heads(start + 2 * C, 3 * C);
  attention.out = heads(mixed, C);
  const ForwardPlan<float> forward{&attention, plan.allocator, nullptr,
                                   (p.T + kQueries - 1) / kQueries, /*whole_heads=*/true};
  {
    ForwardWorker<float> worker(forward);
    for (int64_t unit; (unit = plan.dealer->take(index)) != plan.dealer->none();) {
      const int64_t begin = unit * plan.group;
      const int64_t batch = std::min(plan.group, p.B - begin);
      const size_t rows = static_cast<size_t>(batch) * T_;
      const size_t at = static_cast<size_t>(begin) * T_ * C;
      qkv.Apply(a.x + at, C, rows, projected, 3 * C);
      if (p.key_padding != nullptr)
        attention.problem.key_padding = p.key_padding + begin * p.key_padding_row;
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t h = 0; h < p.H; ++h) worker.WholeHead(b, h);
      }
      proj.Apply(mixed, C, rows, a.out + at, C);
    }
  }
  if (allocated != nullptr) plan.allocator->release(allocated);
}

}  // namespace

void ModuleForward(void* data, int index) {
  Work(data, index);
}

}  // namespace attn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attn::kernels {

HWY_EXPORT(ModuleForward);

namespace {

constexpr int64_t kTokens = 48;  // in a unit

// Microseconds on one core, roughly.
double estimated_microseconds(const Problem& p) {
  const double tokens = static_cast<double>(p.B * p.T);
  const double C = static_cast<double>(p.H * p.D);
  const double pairs = static_cast<double>(p.B * p.T * p.T) * (p.causal ? 0.5 : 1.0);
  const double heads = static_cast<double>(p.B * p.H);
  return tokens * C * C * 8.0 / 60e3 + heads * 0.15 + pairs * C * 4.0 / 40e3;
}

constexpr double kSerialMicroseconds = 6.0;  // a parallel region costs about one to enter

}  // namespace

// Wider or longer, LibTorch's linears are good, and weights packed for each thread leave its
// cache. One thread is faster than two up to some 20 us: that is what LibTorch's three parallel
// regions cost.
bool module_forward_pays(const Problem& p, int threads) {
  return p.H * p.D <= 128 && p.T <= 256 && (p.B >= threads || estimated_microseconds(p) < 24.0);
}

void module_forward(const ModuleArguments& arguments, const Parallel& parallel,
                    const Allocator& allocator) {
  const Problem& p = arguments.problem;
  if (p.B * p.T == 0) return;
  const bool serial =
      parallel.threads == 1 || p.B == 1 || estimated_microseconds(p) < kSerialMicroseconds;
  const int workers = serial ? 1 : static_cast<int>(std::min<int64_t>(parallel.threads, p.B));
  // Whole tiles of tokens, yet a unit or more for every worker.
  const int64_t group = std::clamp<int64_t>(kTokens / p.T, 1, (p.B + workers - 1) / workers);
  Dealer dealer((p.B + group - 1) / group, workers);
  ModulePlan plan{&arguments, &allocator, &dealer, group};
  const auto work = HWY_DYNAMIC_DISPATCH(ModuleForward);
  if (workers == 1) {
    work(&plan, 0);
  } else {
    parallel.run(workers, work, &plan);
  }
}

}  // namespace attn::kernels
#endif
