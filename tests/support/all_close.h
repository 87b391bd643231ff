#pragma once

// Matchers for tensors. `EXPECT_TRUE(all_close(actual, expected))` prints the worst element when it
// fails.

#include <torch/types.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>

namespace attn::testing {

struct Tolerance {
  double rtol;
  double atol;
};

/// torch.testing.assert_close's defaults for a dtype.
inline Tolerance default_tolerance(torch::Dtype dtype) {
  switch (dtype) {
    case torch::kFloat64:
      return {1e-7, 1e-7};
    case torch::kBFloat16:
      return {1.6e-2, 1e-5};
    case torch::kFloat16:
      return {1e-3, 1e-5};
    default:
      return {1.3e-6, 1e-5};
  }
}

inline std::string describe(const torch::Tensor& x) {
  std::ostringstream out;
  out << x.sizes() << ' ' << x.dtype() << ' ' << x.device();
  return out.str();
}

/// |actual - expected| <= atol + rtol · |expected| everywhere, same shape and dtype; NaN equals
/// NaN.
inline ::testing::AssertionResult all_close(const torch::Tensor& actual,
                                            const torch::Tensor& expected, Tolerance tolerance) {
  if (!actual.defined() || !expected.defined()) {
    return ::testing::AssertionFailure() << "undefined tensor";
  }
  if (actual.sizes() != expected.sizes() || actual.dtype() != expected.dtype()) {
    return ::testing::AssertionFailure()
           << "got " << describe(actual) << ", expected " << describe(expected);
  }
  if (actual.numel() == 0) return ::testing::AssertionSuccess();
  const auto a = actual.detach().to(torch::kCPU, torch::kFloat64);
  const auto e = expected.detach().to(torch::kCPU, torch::kFloat64);
  const auto close = torch::isclose(a, e, tolerance.rtol, tolerance.atol, /*equal_nan=*/true);
  if (close.all().item<bool>()) return ::testing::AssertionSuccess();

  auto excess = (a - e).abs() - (tolerance.atol + tolerance.rtol * e.abs());
  excess = torch::where(close, torch::full_like(excess, -1.0), excess.nan_to_num(1e300));
  auto flat = excess.argmax().item<int64_t>();
  const auto worst = flat;
  std::ostringstream index;
  for (int64_t d = a.dim(); d-- > 0;) {
    const auto part = std::to_string(flat % a.size(d));
    const auto so_far = index.str();
    index.str("");
    index << part << (so_far.empty() ? "" : ", ") << so_far;
    flat /= a.size(d);
  }
  return ::testing::AssertionFailure()
         << (~close).sum().item<int64_t>() << " of " << a.numel()
         << " elements differ; the worst at [" << index.str() << "]: got "
         << a.flatten()[worst].item<double>() << ", expected " << e.flatten()[worst].item<double>()
         << " (rtol " << tolerance.rtol << ", atol " << tolerance.atol << ")";
}

inline ::testing::AssertionResult all_close(const torch::Tensor& actual,
                                            const torch::Tensor& expected) {
  return all_close(actual, expected, default_tolerance(expected.scalar_type()));
}

/// Same shape, dtype and bits (NaN equals NaN only by value, -0 equals +0).
inline ::testing::AssertionResult all_equal(const torch::Tensor& actual,
                                            const torch::Tensor& expected) {
  return all_close(actual, expected, {0.0, 0.0});
}

}  // namespace attn::testing
