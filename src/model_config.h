#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <string>

namespace attn {

/// A model folder's config.json: values by name, checked. null is as if it were not there.
class ModelConfig {
 public:
  /// @throws c10::ValueError, as all of it, naming the file.
  explicit ModelConfig(const std::filesystem::path& path);

  const std::string& name() const { return name_; }  ///< the file's, for messages

  bool flag(const char* key, bool otherwise) const;
  /// From 1 to 2^31 - 1.
  int64_t size(const char* key, int64_t otherwise) const;
  int64_t size(const char* key) const;  ///< must be there
  double number(const char* key, double otherwise, double least, double most) const;
  std::string text(const char* key, const char* otherwise) const;

 private:
  const nlohmann::json* find(const char* key) const;

  std::string name_;
  nlohmann::json json_;
};

/// Writes such a file, beside and renamed.
void write_config(const nlohmann::json& config, const std::filesystem::path& path);

}  // namespace attn
