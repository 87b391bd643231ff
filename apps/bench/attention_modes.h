#pragma once

#include <array>
#include <string_view>

namespace bench {

/// What `attn_bench attention` measures.
struct AttentionMode {
  std::string_view name;  ///< of --mode
  std::string_view title;
  bool backward = false;  ///< forward and backward through autograd; else InferenceMode
  double dropout_p = 0.0;
  bool causal = true;
  bool padded = false;    ///< with a key padding mask
  bool bfloat16 = false;  ///< else float32
};

inline constexpr std::array kAttentionModes = {
    AttentionMode{.name = "forward", .title = "forward, causal, float32"},
    AttentionMode{
        .name = "backward", .title = "forward + backward, causal, float32", .backward = true},
    AttentionMode{.name = "dropout",
                  .title = "forward + backward, causal, dropout 0.1, float32",
                  .backward = true,
                  .dropout_p = 0.1},
    AttentionMode{
        .name = "bidirectional", .title = "forward, bidirectional, float32", .causal = false},
    AttentionMode{.name = "padding",
                  .title = "forward, bidirectional, key padding, float32",
                  .causal = false,
                  .padded = true},
    AttentionMode{.name = "bf16", .title = "forward, causal, bfloat16", .bfloat16 = true},
    AttentionMode{.name = "bf16-backward",
                  .title = "forward + backward, causal, bfloat16",
                  .backward = true,
                  .bfloat16 = true},
};

}  // namespace bench
