#pragma once

#include <string>
#include <string_view>

namespace attn::weights {

/// The text in quotes, fit for an error message: a file can't put control characters or pages of
/// text into it.
std::string in_quotes(std::string_view text);

}  // namespace attn::weights
