#pragma once

#include <attn/export.h>
#include <attn/functional.h>

#include <torch/csrc/api/include/torch/ordered_dict.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

namespace attn {

/// Names and tensors in registration order.
using StateDict = torch::OrderedDict<std::string, Tensor>;

/// A module that uses one tensor under several names, as a language model whose head is its token
/// embedding. Each tensor is registered once, so that optimisers and counts see it once.
class ATTN_API TiedWeights {
 public:
  virtual ~TiedWeights() = default;
  /// (alias, name) pairs, relative to the module: the state dict shows the tensor `name` as `alias`
  /// too, after the module's own keys.
  virtual std::vector<std::pair<std::string, std::string>> tied_weights() const = 0;
};

/// Parameters and buffers of the module and its children: exactly Python's `state_dict()` keys, in
/// Python's order, tied tensors under each of their names. The tensors share the module's storage
/// and are detached.
ATTN_API StateDict state_dict(const torch::nn::Module& module);

struct LoadStateDictOptions {
  bool strict = true;          ///< missing and unexpected keys are errors
  bool convert_dtype = false;  ///< accept another floating-point dtype and convert
};

/// What did not fit, every fault at once.
struct ATTN_API LoadReport {
  std::vector<std::string> missing_keys;     ///< the module has them, the dict has not
  std::vector<std::string> unexpected_keys;  ///< the dict has them, the module has not
  std::vector<std::string> mismatched;       ///< "name: requirement, got value"

  bool ok() const { return missing_keys.empty() && unexpected_keys.empty() && mismatched.empty(); }
  /// Every fault by name, a line each.
  std::string to_string() const;
};

/// Copies the dict's values into the module's tensors, in place: identity, device, `requires_grad`
/// and optimiser state stay. All or nothing: on any error the module is unchanged. Of a tied
/// tensor's names one is enough; several must hold equal values.
///
/// @throws c10::ValueError with the whole report if a shape or dtype does not fit, or, when strict,
/// a key is missing or unexpected. Not strict: returns missing and unexpected keys in the report.
ATTN_API LoadReport load_state_dict(torch::nn::Module& module, const StateDict& state,
                                    const LoadStateDictOptions& options = {});

}  // namespace attn
