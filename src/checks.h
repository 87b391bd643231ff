#pragma once

// Checks of what a user hands in, shared by the modules: requirement, then the value.

#include <attn/functional.h>

#include <cstdint>

namespace attn {

/// `name` must be at least 1.
void check_positive(const char* name, int64_t value);

/// `value` must be a multiple of `divisor`; both are named.
void check_multiple(const char* name, int64_t value, const char* divisor_name, int64_t divisor);

/// `name` must be a probability in [0, 1] (NaN is none).
void check_probability(const char* name, double p);

/// x must be a floating-point [B, T, C] tensor, C being called `width_name`.
void check_sequence(const Tensor& x, const char* width_name, int64_t width);

/// The last dimension of x must be `width`, called `width_name`.
void check_width(const Tensor& x, const char* width_name, int64_t width);

/// T must be at most `limit`, called `limit_name`.
void check_length(int64_t length, const char* limit_name, int64_t limit);

/// ids must be int32 or int64, each in [0, vocab_size): checked before any kernel sees them, for on
/// CUDA an index out of range makes the whole process unusable. On CUDA this waits for the device.
void check_token_ids(const Tensor& ids, int64_t vocab_size);

/// ids must be [B, T] with T at least 1.
void check_some_tokens(const Tensor& ids);

/// As `check_token_ids`, and ids must be [B, T].
void check_token_sequences(const Tensor& ids, int64_t vocab_size);

}  // namespace attn
