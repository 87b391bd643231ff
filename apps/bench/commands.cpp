#include "commands.h"

namespace bench {

const std::vector<Command>& commands() {
  static const std::vector<Command> all = {
      {"attention", "packed_self_attention beside scaled_dot_product_attention", bench_attention},
      {"module", "SelfAttention and MultiHeadSelfAttention beside other modules", bench_module},
      {"lm", "TinyAttentionLM: training steps and inference", bench_lm},
  };
  return all;
}

}  // namespace bench
