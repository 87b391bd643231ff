#include "attn/kv_cache.h"

#include "checks.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

namespace attn {

struct KVCache::Layer::Shared {
  KVCacheOptions options;
  int64_t length = 0;
};

namespace {

void check_length_fits(const KVCacheOptions& options, int64_t length, int64_t tokens) {
  TORCH_CHECK_VALUE(tokens <= options.capacity() - length,
                    "the tokens must fit the cache's capacity (", options.capacity(), "), got ",
                    tokens, " after ", length);
}

}  // namespace

int64_t KVCache::Layer::length() const {
  return shared_->length;
}

std::pair<Tensor, Tensor> KVCache::Layer::append(const Tensor& k, const Tensor& v) {
  const auto& o = shared_->options;
  const int64_t length = shared_->length;
  for (const auto* x : {&k, &v}) {
    const char* name = x == &k ? "keys" : "values";
    TORCH_CHECK_VALUE(x->dim() == 4 && x->size(0) == o.batch() && x->size(1) == o.n_heads() &&
                          x->size(3) == o.d_head(),
                      "cached ", name, " must be [B, H, T, D] with B = ", o.batch(),
                      ", H = ", o.n_heads(), ", D = ", o.d_head(), ", got shape ", x->sizes());
    TORCH_CHECK_VALUE(x->scalar_type() == o.dtype() && x->device().type() == o.device().type(),
                      "cached ", name, " must be ", o.dtype(), " on ", o.device(), ", got ",
                      x->scalar_type(), " on ", x->device());
    TORCH_CHECK_VALUE(!(c10::GradMode::is_enabled() && x->requires_grad()),
                      "a cache must be used without gradients (torch::NoGradGuard), got ", name,
                      " that want them");
  }
  TORCH_CHECK_VALUE(k.size(2) == v.size(2), "keys and values must be as many, got ", k.size(2),
                    " and ", v.size(2));
  const int64_t T = k.size(2);
  check_length_fits(o, length, T);
  keys_.narrow(2, length, T).copy_(k);
  values_.narrow(2, length, T).copy_(v);
  return {keys_.narrow(2, 0, length + T), values_.narrow(2, 0, length + T)};
}

KVCache::KVCache(const KVCacheOptions& options)
    : shared_(std::make_shared<Layer::Shared>(Layer::Shared{options})) {
  check_positive("n_layers", options.n_layers());
  TORCH_CHECK_VALUE(options.batch() >= 0, "batch must be at least 0, got ", options.batch());
  check_positive("n_heads", options.n_heads());
  check_positive("d_head", options.d_head());
  check_positive("capacity", options.capacity());
  TORCH_CHECK_VALUE(c10::isFloatingType(options.dtype()), "dtype must be floating-point, got ",
                    options.dtype());
  // What is allocated inside of InferenceMode could not be written outside of it.
  const c10::InferenceMode ordinary(false);
  layers_.resize(static_cast<size_t>(options.n_layers()));
  for (auto& layer : layers_) {
    const auto storage = [&] {
      return at::empty({options.batch(), options.n_heads(), options.capacity(), options.d_head()},
                       at::TensorOptions(options.dtype()).device(options.device()));
    };
    layer.shared_ = shared_;
    layer.keys_ = storage();
    layer.values_ = storage();
  }
}

int64_t KVCache::length() const {
  return shared_->length;
}

int64_t KVCache::capacity() const {
  return shared_->options.capacity();
}

const KVCacheOptions& KVCache::options() const {
  return shared_->options;
}

KVCache::Layer& KVCache::layer(int64_t i) {
  TORCH_CHECK_VALUE(i >= 0 && i < shared_->options.n_layers(), "layer must be in [0, ",
                    shared_->options.n_layers(), "), got ", i);
  return layers_[static_cast<size_t>(i)];
}

void KVCache::check_room(int64_t n_layers, int64_t batch, int64_t tokens) const {
  const auto& o = shared_->options;
  TORCH_CHECK_VALUE(n_layers == o.n_layers(), "the cache must have the model's layers (", n_layers,
                    "), got ", o.n_layers());
  TORCH_CHECK_VALUE(batch == o.batch(), "the batch must be the cache's (", o.batch(), "), got ",
                    batch);
  check_length_fits(o, shared_->length, tokens);
}

void KVCache::advance(int64_t tokens) {
  TORCH_CHECK_VALUE(tokens >= 0, "tokens must be at least 0, got ", tokens);
  check_length_fits(shared_->options, shared_->length, tokens);
  shared_->length += tokens;
}

void KVCache::truncate(int64_t length) {
  TORCH_CHECK_VALUE(length >= 0 && length <= shared_->length,
                    "a cache can be cut to a length in [0, ", shared_->length, "], got ", length);
  shared_->length = length;
}

KVCache KVCache::clone() const {
  KVCache copy(shared_->options);
  const int64_t length = shared_->length;
  for (size_t i = 0; i < layers_.size(); ++i) {
    copy.layers_[i].keys_.narrow(2, 0, length).copy_(layers_[i].keys_.narrow(2, 0, length));
    copy.layers_[i].values_.narrow(2, 0, length).copy_(layers_[i].values_.narrow(2, 0, length));
  }
  copy.shared_->length = length;
  return copy;
}

}  // namespace attn
