#pragma once

/// attn: self-attention and decoder transformers for LibTorch.
///
/// Letters of every shape in this library:
///   B batch   T query tokens   S key tokens (cached + T)   C model width
///   H heads   D head width (C / H)   V vocabulary size
///
/// @code
/// torch::manual_seed(0);
/// attn::SelfAttention attention(/*n_embd=*/8, /*n_head=*/2);
/// torch::Tensor x = torch::randn({1, 4, 8});  // [B, T, C]
/// torch::Tensor y = attention(x);             // [B, T, C]
/// @endcode

#include <attn/byte_level_bpe.h>
#include <attn/export.h>
#include <attn/functional.h>
#include <attn/generation.h>
#include <attn/heatmap.h>
#include <attn/kv_cache.h>
#include <attn/model_folder.h>
#include <attn/models/gpt.h>
#include <attn/models/gpt2.h>
#include <attn/models/tiny_attention_lm.h>
#include <attn/modules/cloneable.h>
#include <attn/modules/embedding.h>
#include <attn/modules/feed_forward.h>
#include <attn/modules/layer_norm.h>
#include <attn/modules/multi_head_attention.h>
#include <attn/modules/multi_head_self_attention.h>
#include <attn/modules/self_attention.h>
#include <attn/modules/transformer_block.h>
#include <attn/state_dict.h>
#include <attn/summary.h>
#include <attn/token_data.h>
#include <attn/training.h>
#include <attn/version.h>
#include <attn/weights.h>
