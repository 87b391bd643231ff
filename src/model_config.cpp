#include "model_config.h"

#include "json.h"
#include "weights/in_quotes.h"
#include "weights/mapped_file.h"
#include "weights/output_file.h"

#include <c10/util/Exception.h>

#include <limits>

namespace attn {

using nlohmann::json;
using weights::in_quotes;

ModelConfig::ModelConfig(const std::filesystem::path& path) {
  const weights::MappedFile file(path);
  name_ = file.name();
  json_ = parse_json(file.bytes(), name_);
  TORCH_CHECK_VALUE(json_.is_object(), name_, " must be a JSON object, got ", json_.type_name());
}

const json* ModelConfig::find(const char* key) const {
  const auto found = json_.find(key);
  return found == json_.end() || found->is_null() ? nullptr : &*found;
}

bool ModelConfig::flag(const char* key, bool otherwise) const {
  const auto* value = find(key);
  if (value == nullptr) return otherwise;
  TORCH_CHECK_VALUE(value->is_boolean(), name_, ": ", key, " must be true or false, got ",
                    in_quotes(value->dump()));
  return value->get<bool>();
}

int64_t ModelConfig::size(const char* key, int64_t otherwise) const {
  const auto* value = find(key);
  if (value == nullptr) return otherwise;
  const bool fits = value->is_number_unsigned() && value->get<uint64_t>() >= 1 &&
                    value->get<uint64_t>() <= std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(fits, name_, ": ", key, " must be an integer from 1 to 2^31 - 1, got ",
                    in_quotes(value->dump()));
  return value->get<int64_t>();
}

int64_t ModelConfig::size(const char* key) const {
  TORCH_CHECK_VALUE(find(key) != nullptr, name_, ": ", key, " must be there, got none");
  return size(key, 1);
}

double ModelConfig::number(const char* key, double otherwise, double least, double most) const {
  const auto* value = find(key);
  if (value == nullptr) return otherwise;
  TORCH_CHECK_VALUE(
      value->is_number() && value->get<double>() >= least && value->get<double>() <= most, name_,
      ": ", key, " must be a number from ", least, " to ", most, ", got ",
      in_quotes(value->dump()));
  return value->get<double>();
}

std::string ModelConfig::text(const char* key, const char* otherwise) const {
  const auto* value = find(key);
  if (value == nullptr) return otherwise;
  TORCH_CHECK_VALUE(value->is_string(), name_, ": ", key, " must be a string, got ",
                    in_quotes(value->dump()));
  return value->get<std::string>();
}

void write_config(const json& config, const std::filesystem::path& path) {
  weights::write_file(path, config.dump(2) + "\n");
}

}  // namespace attn
