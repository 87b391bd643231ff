#pragma once

namespace attn {

/// How a bool option is printed.
inline const char* yes_no(bool value) {
  return value ? "true" : "false";
}

}  // namespace attn
