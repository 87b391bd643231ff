#include "attn/summary.h"

#include <attn/functional.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>
#include <vector>

namespace attn {
namespace {

struct Row {
  std::string name;   // indented by depth
  std::string what;   // type of a module, shape and dtype of a tensor
  std::string count;  // of parameters; empty for modules without any
  std::string bytes;
};

std::string with_commas(int64_t n) {
  auto digits = std::to_string(n);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3)
    digits.insert(static_cast<size_t>(at), 1, ',');
  return digits;
}

std::string readable_bytes(int64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024.0;
  for (const char* unit : {"KiB", "MiB", "GiB"}) {
    if (value < 1024.0) return fmt::format("{:.1f} {}", value, unit);
    value /= 1024.0;
  }
  return fmt::format("{:.1f} TiB", value);
}

// "attn::TinyAttentionLMImpl" -> "TinyAttentionLM"
std::string type_name(const torch::nn::Module& module) {
  auto name = module.name();
  if (const auto colon = name.rfind("::"); colon != std::string::npos) name.erase(0, colon + 2);
  if (name.ends_with("Impl")) name.erase(name.size() - 4);
  return name;
}

int64_t bytes_of(const at::Tensor& x) {
  return x.numel() * static_cast<int64_t>(x.element_size());
}

class Tree {
 public:
  explicit Tree(const torch::nn::Module& root) { add(root, type_name(root), "", 0); }

  std::string to_string() const {
    std::vector<size_t> width(4, 0);
    for (const auto& row : rows_) {
      width[0] = std::max(width[0], row.name.size());
      width[1] = std::max(width[1], row.what.size());
      width[2] = std::max(width[2], row.count.size());
      width[3] = std::max(width[3], row.bytes.size());
    }
    std::string out;
    for (const auto& row : rows_) {
      auto line = fmt::format("{:<{}}  {:<{}}  {:>{}}  {:>{}}", row.name, width[0], row.what,
                              width[1], row.count, width[2], row.bytes, width[3]);
      line.erase(line.find_last_not_of(' ') + 1);
      out += line + '\n';
    }
    out += fmt::format("{} parameters ({} trainable), {}\n", with_commas(parameters_),
                       with_commas(trainable_), readable_bytes(bytes_));
    if (buffer_bytes_ > 0) out += fmt::format("buffers: {}\n", readable_bytes(buffer_bytes_));
    return out;
  }

 private:
  void add(const torch::nn::Module& module, const std::string& name, const std::string& what,
           size_t depth) {
    rows_.push_back({std::string(2 * depth, ' ') + name, what, "", ""});
    for (const auto& p : module.named_parameters(/*recurse=*/false)) {
      add_tensor(p.key(), p.value(), depth + 1, /*parameter=*/true);
    }
    for (const auto& b : module.named_buffers(/*recurse=*/false)) {
      add_tensor(b.key(), b.value(), depth + 1, /*parameter=*/false);
    }
    for (const auto& child : module.named_children()) {
      add(*child.value(), child.key(), type_name(*child.value()), depth + 1);
    }
  }

  void add_tensor(const std::string& name, const at::Tensor& x, size_t depth, bool parameter) {
    if (!x.defined()) return;
    const bool first = seen_.insert(x.unsafeGetTensorImpl()).second;
    auto what =
        fmt::format("[{}] {}", fmt::join(x.sizes().vec(), ", "), c10::toString(x.scalar_type()));
    if (!first) what += " (shared)";
    if (first && parameter) {
      parameters_ += x.numel();
      if (x.requires_grad()) trainable_ += x.numel();
      bytes_ += bytes_of(x);
    } else if (first) {
      what += " buffer";
      buffer_bytes_ += bytes_of(x);
    }
    rows_.push_back({std::string(2 * depth, ' ') + name, what,
                     first && parameter ? with_commas(x.numel()) : "",
                     first ? readable_bytes(bytes_of(x)) : ""});
  }

  std::vector<Row> rows_;
  std::unordered_set<const void*> seen_;
  int64_t parameters_ = 0;
  int64_t trainable_ = 0;
  int64_t bytes_ = 0;
  int64_t buffer_bytes_ = 0;
};

}  // namespace

int64_t count_parameters(const torch::nn::Module& module) {
  std::unordered_set<const void*> seen;
  int64_t count = 0;
  for (const auto& p : module.parameters()) {
    if (p.defined() && seen.insert(p.unsafeGetTensorImpl()).second) count += p.numel();
  }
  return count;
}

std::string summary(const torch::nn::Module& module) {
  return Tree(module).to_string();
}

}  // namespace attn
