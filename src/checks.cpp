#include "checks.h"

#include <ATen/ops/aminmax.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace attn {

void check_positive(const char* name, int64_t value) {
  TORCH_CHECK_VALUE(value >= 1, name, " must be at least 1, got ", value);
}

void check_multiple(const char* name, int64_t value, const char* divisor_name, int64_t divisor) {
  TORCH_CHECK_VALUE(value % divisor == 0, name, " must be a multiple of ", divisor_name, " (",
                    divisor, "), got ", value);
}

void check_probability(const char* name, double p) {
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, name, " must be in [0, 1], got ", p);
}

void check_width(const Tensor& x, const char* width_name, int64_t width) {
  TORCH_CHECK_VALUE(x.defined(), "x must be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(x.is_floating_point(), "x must be floating-point, got ", x.scalar_type());
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == width, "the last dimension of x must be ",
                    width_name, " (", width, "), got shape ", x.sizes());
}

void check_sequence(const Tensor& x, const char* width_name, int64_t width) {
  TORCH_CHECK_VALUE(!x.defined() || x.dim() == 3, "x must be 3-D [B, T, ", width_name,
                    "], got shape ", x.sizes());
  check_width(x, width_name, width);
}

void check_length(int64_t length, const char* limit_name, int64_t limit) {
  TORCH_CHECK_VALUE(length <= limit, "sequence length must be at most ", limit_name, " (", limit,
                    "), got ", length);
}

void check_token_ids(const Tensor& ids, int64_t vocab_size) {
  TORCH_CHECK_VALUE(ids.defined(), "ids must be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt,
                    "ids must be int64 or int32, got ", ids.scalar_type());
  if (ids.numel() == 0 || ids.is_meta()) return;

  int64_t least = 0;
  int64_t greatest = 0;
  if (ids.is_cpu() && ids.scalar_type() == at::kLong && ids.is_contiguous()) {
    // The usual case without two operator calls and their allocations.
    const auto* first = ids.const_data_ptr<int64_t>();
    const auto [min, max] = std::minmax_element(first, first + ids.numel());
    least = *min;
    greatest = *max;
  } else {
    const auto [min, max] = at::aminmax(ids);
    least = min.item<int64_t>();
    greatest = max.item<int64_t>();
  }
  TORCH_CHECK_VALUE(least >= 0, "ids must be at least 0, got ", least);
  TORCH_CHECK_VALUE(greatest < vocab_size, "ids must be less than vocab_size (", vocab_size,
                    "), got ", greatest);
}

void check_some_tokens(const Tensor& ids) {
  TORCH_CHECK_VALUE(ids.defined() && ids.dim() == 2 && ids.size(1) >= 1,
                    "ids must be 2-D [B, T] with at least 1 token, got shape ",
                    ids.defined() ? ids.sizes() : at::IntArrayRef());
}

void check_token_sequences(const Tensor& ids, int64_t vocab_size) {
  TORCH_CHECK_VALUE(!ids.defined() || ids.dim() == 2, "ids must be 2-D [B, T], got shape ",
                    ids.sizes());
  check_token_ids(ids, vocab_size);
}

}  // namespace attn
