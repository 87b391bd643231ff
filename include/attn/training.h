#pragma once

/// What a training loop needs beside the model: AdamW in one fused pass, clipping, a schedule and a
/// loss that never holds all logits.
///
/// @code
/// attn::GPT model(attn::GPTOptions().vocab_size(64).context_length(8).d_model(16).num_heads(2)
///                     .num_layers(1).dropout(0.0));
/// attn::AdamW optimizer(*model);
/// const attn::WarmupCosine schedule{.peak = 1e-3, .least = 1e-4, .warmup_steps = 2,
///                                   .total_steps = 10};
/// torch::Tensor ids = torch::randint(0, 64, {4, 9});  // [B, T + 1]
/// for (int64_t step = 0; step < 10; ++step) {
///   torch::Tensor h = model->forward_features(ids.narrow(1, 0, 8));  // [B, T, C]
///   torch::Tensor loss = attn::chunked_cross_entropy(
///       h.flatten(0, 1), model->head_weight(), ids.narrow(1, 1, 8).flatten());
///   optimizer.zero_grad();
///   loss.backward();
///   attn::clip_grad_norm(model->parameters(), 1.0);
///   optimizer.set_lr(schedule.at(step));
///   optimizer.step();
/// }
/// @endcode

#include <attn/export.h>
#include <attn/state_dict.h>

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

namespace attn {

/// Of `AdamW`. GPT-3's values (Brown et al. 2020, appendix B), but for lr, which is a matter of the
/// model's size.
struct AdamWOptions {
  double lr = 3e-4;
  double beta1 = 0.9;   ///< decay of the gradients' mean
  double beta2 = 0.95;  ///< of their squares' mean; PyTorch's default is 0.999
  double eps = 1e-8;
  double weight_decay = 0.1;  ///< of tensors with at least 2 dimensions; PyTorch's default is 0.01
};

/// AdamW (Loshchilov & Hutter 2019) as torch.optim.AdamW(fused=True), over a module's parameters
/// that require a gradient, a shared one once. Weights and embeddings (2 dimensions and more) decay
/// by lr * weight_decay a step; biases and norms do not.
class ATTN_API AdamW {
 public:
  /// Keeps the parameters, not the module. Its state is as large as twice the parameters.
  /// @throws c10::ValueError if an option is out of range, no parameter requires a gradient, or one
  /// is not a dense floating-point tensor.
  explicit AdamW(const torch::nn::Module& module, const AdamWOptions& options = {});
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;
  AdamW(AdamW&&) = default;
  AdamW& operator=(AdamW&&) = default;

  /// Updates every parameter that has a gradient; another keeps its value and its count of steps.
  /// @throws c10::ValueError, before any change, for a sparse gradient, or if the module went to
  /// another dtype or device since.
  void step();
  /// Drops the gradients: a parameter without one costs no memory and no work.
  void zero_grad();

  double lr() const { return options_.lr; }
  /// @throws c10::ValueError unless finite and at least 0.
  void set_lr(double lr);
  const AdamWOptions& options() const { return options_; }

  /// `exp_avg.<name>` and `exp_avg_sq.<name>`, each as its parameter, for every parameter, and
  /// `step`, int64 [parameters]: how often each was updated. All but `step` share the optimiser's
  /// storage. The options are not in it: they are the program's.
  StateDict state_dict() const;
  /// Copies the values. All or nothing.
  /// @throws c10::ValueError with every key that is missing or unexpected, or whose shape or dtype
  /// differs.
  void load_state_dict(const StateDict& state);

 private:
  struct Parameter {
    std::string name;
    Tensor value;
    Tensor exp_avg, exp_avg_sq;
    Tensor step;  // float32 [], on the parameter's device
  };
  std::vector<Parameter> parameters_;
  AdamWOptions options_;
};

/// Scales the parameters' gradients in place by min(1, max_norm / (norm + 1e-6)), norm being that
/// of all of them together, and returns it: torch.nn.utils.clip_grad_norm_. A parameter without a
/// gradient is passed over; without any, 0. The norm is float32 for lower precision. If it is not
/// finite, neither are the gradients afterwards: skip the step then. On CUDA this waits for the
/// device.
/// @throws c10::ValueError if max_norm is below 0 or NaN, or the gradients are on several devices.
ATTN_API double clip_grad_norm(const std::vector<Tensor>& parameters, double max_norm);

/// A learning rate that rises linearly and falls as a cosine (Loshchilov & Hutter 2017, one cycle).
/// At step s, with W = warmup_steps and N = total_steps:
///   s < W:       peak * (s + 1) / W
///   W <= s < N:  least + (peak - least) / 2 * (1 + cos(pi * (s - W) / (N - W)))
///   N <= s:      least
struct ATTN_API WarmupCosine {
  double peak = 0.0;
  double least = 0.0;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;

  /// @throws c10::ValueError unless step >= 0, 0 <= least <= peak and
  /// 0 <= warmup_steps <= total_steps.
  double at(int64_t step) const;
};

/// Mean cross entropy of the logits hidden @ weightᵀ + bias: hidden [N, C], weight [V, C], targets
/// [N] int64 in [0, V), bias [V] or undefined -> float32 [] (float64 for float64). It equals
/// `cross_entropy(linear(hidden, weight, bias), targets)`, but the logits [N, V] exist for `chunk`
/// rows at a time; 0 takes as many as make 64 MB of float32. Logits are computed in the tensors'
/// dtype, or autocast's, softmax and sums in float32.
///
/// The gradients that are wanted are computed here, chunk by chunk, since the logits are at hand;
/// backward only scales them. Second derivatives are refused with std::runtime_error.
/// @throws c10::ValueError if shapes, dtypes or devices do not fit, N is 0, or a target is out of
/// range. On CUDA this check waits for the device.
ATTN_API Tensor chunked_cross_entropy(const Tensor& hidden, const Tensor& weight,
                                      const Tensor& targets, const Tensor& bias = {},
                                      int64_t chunk = 0);

}  // namespace attn
