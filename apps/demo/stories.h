#pragma once

#include "options.h"
#include "report.h"
#include "setup.h"

#include <string>
#include <string_view>

namespace demo {

/// SelfAttention (the first seed document): shapes step by step, then causality with and without
/// the mask.
void tell_self_attention(Report& report, const Setup& setup, uint64_t seed);

/// MultiHeadSelfAttention and TinyAttentionLM (the second one): shapes, mask, summary, training on
/// the repeat task, attention weights. Returns these as SVG.
std::string tell_language_model(Report& report, const Setup& setup, const Options& options);

/// Pre-LN against post-LN: how much gradient reaches the embedding below six blocks.
void tell_block_stack(Report& report, const Setup& setup, uint64_t seed);

/// TinyAttentionLM on the bytes of a text: held-out loss beside n-gram models, and a continuation.
/// Returns the attention weights on the prompt as SVG.
std::string tell_text(Report& report, const Setup& setup, const Options& options,
                      std::string_view bytes);

}  // namespace demo
