#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/cloneable.h>

#include <memory>
#include <mutex>
#include <optional>

namespace attn {

/// Base of every module here: `torch::nn::Cloneable` whose `clone()` is a faithful copy.
///
/// LibTorch's own `clone()` builds the copy anew by `reset()`, so frozen parameters come back
/// trainable, a ModuleList comes back in training mode, and the default generator has moved on.
/// This one keeps `requires_grad` and the mode at every depth and leaves the default CPU generator
/// as it was.
template <typename Derived>
class Cloneable : public torch::nn::Cloneable<Derived> {
 public:
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override {
    auto generator = at::detail::getDefaultCPUGenerator();
    std::shared_ptr<torch::nn::Module> copy;
    {
      const GeneratorStateGuard guard(generator);
      copy = torch::nn::Cloneable<Derived>::clone(device);
    }
    const auto modules = this->modules(/*include_self=*/false);
    const auto copies = copy->modules(/*include_self=*/false);  // parents before their children
    for (size_t i = 0; i < modules.size(); ++i) {
      const bool training = modules[i]->is_training();
      if (copies[i]->is_training() != training) copies[i]->train(training);
    }
    auto copied = copy->named_parameters();
    for (const auto& parameter : this->named_parameters()) {
      copied[parameter.key()].requires_grad_(parameter.value().requires_grad());
    }
    return copy;
  }

 private:
  struct GeneratorStateGuard {
    explicit GeneratorStateGuard(at::Generator& source) : generator(source) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      state = generator.get_state();
    }
    ~GeneratorStateGuard() {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
    GeneratorStateGuard(const GeneratorStateGuard&) = delete;
    GeneratorStateGuard& operator=(const GeneratorStateGuard&) = delete;

    at::Generator& generator;
    at::Tensor state;
  };
};

}  // namespace attn
