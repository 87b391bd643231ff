#pragma once

#include <vector>

namespace bench {

class Session;

/// A subcommand that prints tables.
struct Command {
  const char* name;
  const char* description;
  void (*run)(Session& session);
};

const std::vector<Command>& commands();

/// attn::functional::packed_self_attention beside LibTorch's scaled_dot_product_attention.
void bench_attention(Session& session);
/// SelfAttention and MultiHeadSelfAttention beside what one writes with LibTorch, in inference.
void bench_module(Session& session);
/// TinyAttentionLM: steps of its training, and inference.
void bench_lm(Session& session);

}  // namespace bench
