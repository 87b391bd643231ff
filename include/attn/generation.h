#pragma once

#include <attn/export.h>
#include <attn/kv_cache.h>

#include <ATen/core/Generator.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace attn {

/// What `generate` needs of a language model. GPT and TinyAttentionLM are ones; implement it to
/// generate with a model of your own.
class ATTN_API CausalLM {
 public:
  virtual ~CausalLM() = default;

  /// Logits of the last position alone: ids [B, T] -> [B, V]. With a cache, ids are the new tokens
  /// only; key_padding_mask is [B, S], cached tokens included, or undefined.
  virtual Tensor last_logits(const Tensor& ids, const Tensor& key_padding_mask, KVCache* cache) = 0;
  /// A cache for `batch` sequences of up to `capacity` tokens.
  virtual KVCache make_cache(int64_t batch, int64_t capacity) const = 0;
  virtual int64_t vocab_size() const = 0;      ///< V
  virtual int64_t context_length() const = 0;  ///< the most tokens it can look at
  /// The module whose training mode `generate` turns off meanwhile; null if there is none.
  virtual torch::nn::Module* module() { return nullptr; }
};

/// Options of `generate`.
struct GenerateOptions {
  int64_t max_new_tokens = 1;
  /// Divides the logits. 0 takes the most likely token and draws nothing.
  double temperature = 1.0;
  /// Only the k most likely tokens (and ties of the last of them); more than V is V, 0 or less is
  /// off.
  std::optional<int64_t> top_k = std::nullopt;
  /// Only the fewest most likely tokens whose probabilities reach top_p, in (0, 1] (Holtzman et al.
  /// 2020); after temperature and top_k.
  std::optional<double> top_p = std::nullopt;
  /// A generator of its own for this call, seeded so: the ids are Python's after
  /// `torch.manual_seed(seed)`, and the default generator is left alone. The draws depend on the
  /// batch: a row alone gets other ones than the same row among others.
  std::optional<uint64_t> seed = std::nullopt;
  /// Draws instead; with neither, the default generator of the ids' device.
  std::optional<at::Generator> generator = std::nullopt;
  /// A row that draws one of these is done and is padded with it; when all are, the call ends.
  std::vector<int64_t> stop_tokens = {};
  /// Keep keys and values. Past the context's length every step is a forward of the last window
  /// whatever this says: positions cannot slide. Same ids either way, to rounding.
  bool use_cache = true;
  /// [B, T] bool, true = padding of the prompt, on the left of a row; undefined = none.
  Tensor key_padding_mask = {};
  /// Ids from here on are never drawn: for vocabularies padded to a round number. 0 = V.
  int64_t used_vocab = 0;
  /// Called after each step with the new ids [B] (int64, the prompt's device); false ends the call.
  std::function<bool(const Tensor& ids)> on_token = {};
};

/// Continues prompt [B, T], int64 or int32, T >= 1, token by token -> int64 [B, T + n] with
/// n <= max_new_tokens. Of a prompt longer than the context the model sees the last part.
///
/// The model is in eval mode meanwhile and gets its mode back however the call ends. No gradients.
/// Several threads may share a model that is in eval mode already, each with its own seed.
///
/// @throws c10::ValueError for options or a prompt out of range, or logits that are NaN.
ATTN_API Tensor generate(CausalLM& model, const Tensor& prompt,
                         const GenerateOptions& options = {});

/// The same for module holders.
///
/// @code
/// attn::TinyAttentionLM model(/*vocab_size=*/64, /*d_model=*/32, /*n_heads=*/4,
///                             /*max_context_length=*/12);
/// torch::Tensor prompt = torch::randint(0, 64, {1, 3});
/// torch::Tensor ids = attn::generate(model, prompt, {.max_new_tokens = 5, .top_k = 10, .seed =
/// 42});
/// // ids [1, 8]
/// @endcode
template <typename Impl>
Tensor generate(const torch::nn::ModuleHolder<Impl>& model, const Tensor& prompt,
                const GenerateOptions& options = {}) {
  return generate(static_cast<CausalLM&>(*model.ptr()), prompt, options);
}

}  // namespace attn
