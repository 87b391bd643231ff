#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <string_view>

namespace attn {

/// JSON as a file must have it: duplicate keys, nesting beyond 64 levels and numbers that overflow
/// are errors.
/// @param name the file's, for messages
/// @throws c10::ValueError
nlohmann::json parse_json(std::string_view text, const std::string& name);

}  // namespace attn
