#include "attn/state_dict.h"

#include <torch/utils.h>

#include <sstream>
#include <utility>

namespace attn {
namespace {

// Python's order: a module's own parameters, its own buffers, then its children one after another.
void collect(const torch::nn::Module& module, const std::string& prefix, StateDict& into) {
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    if (parameter.value().defined()) into.insert(prefix + parameter.key(), parameter.value());
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    if (buffer.value().defined()) into.insert(prefix + buffer.key(), buffer.value());
  }
  for (const auto& child : module.named_children()) {
    collect(*child.value(), prefix + child.key() + ".", into);
  }
  if (const auto* tied = dynamic_cast<const TiedWeights*>(&module)) {
    for (const auto& [alias, name] : tied->tied_weights()) {
      into.insert(prefix + alias, into[prefix + name]);
    }
  }
}

// Names of one tensor: those of `targets` that are the same tensor as `target`.
std::vector<std::string> names_of(const Tensor& target, const StateDict& targets) {
  std::vector<std::string> names;
  for (const auto& entry : targets) {
    if (entry.value().is_same(target)) names.push_back(entry.key());
  }
  return names;
}

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Why `source` can't be copied into `target`, or nothing.
std::string mismatch(const Tensor& target, const Tensor& source, bool convert_dtype) {
  if (!source.defined()) return "must be a tensor, got an undefined one";
  if (source.sizes() != target.sizes()) {
    return text("shape must be ", target.sizes(), ", got ", source.sizes());
  }
  if (source.layout() != at::kStrided || source.is_meta()) {
    return text("must be a dense tensor with values, got ", source.toString());
  }
  const bool convertible = convert_dtype &&
                           source.is_floating_point() == target.is_floating_point() &&
                           source.is_complex() == target.is_complex();
  if (source.scalar_type() != target.scalar_type() && !convertible) {
    return text("dtype must be ", target.scalar_type(), ", got ", source.scalar_type());
  }
  return "";
}

bool given_by_another_name(const StateDict::Item& target, const StateDict& targets,
                           const StateDict& state) {
  for (const auto& name : names_of(target.value(), targets)) {
    if (state.contains(name)) return true;
  }
  return false;
}

using Copies = std::vector<std::pair<Tensor, Tensor>>;  // target, source

// What is copied into the target already, under another of its names.
const Tensor* copied(const Tensor& target, const Copies& copies) {
  for (const auto& [to, from] : copies) {
    if (to.is_same(target)) return &from;
  }
  return nullptr;
}

// NaN equals NaN: what was saved twice is read twice.
bool same_values(const Tensor& a, const Tensor& b) {
  if (a.is_same(b)) return true;
  const auto other = b.to(a.device(), a.scalar_type());
  return a.eq(other).logical_or(a.isnan().logical_and(other.isnan())).all().item<bool>();
}

void append_list(std::ostringstream& out, const char* heading,
                 const std::vector<std::string>& entries) {
  if (entries.empty()) return;
  out << '\n' << heading;
  for (const auto& entry : entries) out << "\n  " << entry;
}

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict all("state_dict");
  collect(module, "", all);
  StateDict detached("state_dict");
  for (const auto& entry : all) detached.insert(entry.key(), entry.value().detach());
  return detached;
}

std::string LoadReport::to_string() const {
  if (ok()) return "every key matches";
  std::ostringstream out;
  out << missing_keys.size() << " missing, " << unexpected_keys.size() << " unexpected, "
      << mismatched.size() << " mismatched";
  append_list(out, "missing keys:", missing_keys);
  append_list(out, "unexpected keys:", unexpected_keys);
  append_list(out, "mismatched:", mismatched);
  return out.str();
}

LoadReport load_state_dict(torch::nn::Module& module, const StateDict& state,
                           const LoadStateDictOptions& options) {
  StateDict targets("state_dict");
  collect(module, "", targets);

  LoadReport report;
  Copies copies;
  for (const auto& target : targets) {
    const auto* source = state.find(target.key());
    if (source == nullptr) {
      if (!given_by_another_name(target, targets, state))
        report.missing_keys.push_back(target.key());
      continue;
    }
    const auto fault = mismatch(target.value(), *source, options.convert_dtype);
    if (fault.empty()) {
      const auto* first = copied(target.value(), copies);
      if (first == nullptr) {
        copies.emplace_back(target.value(), *source);
      } else if (!same_values(*first, *source)) {
        report.mismatched.push_back(target.key() + ": must equal " +
                                    names_of(target.value(), targets).front() +
                                    ", with which it is tied, got other values");
      }
    } else {
      report.mismatched.push_back(target.key() + ": " + fault);
    }
  }
  for (const auto& entry : state) {
    if (!targets.contains(entry.key())) report.unexpected_keys.push_back(entry.key());
  }

  const bool acceptable = options.strict ? report.ok() : report.mismatched.empty();
  TORCH_CHECK_VALUE(acceptable, "state_dict must fit the module, got ", report.to_string());

  const torch::NoGradGuard no_grad;
  for (const auto& [target, source] : copies) target.copy_(source);
  return report;
}

}  // namespace attn
