#pragma once

#include <attn/export.h>

namespace attn {

/// Version of the library that is linked, "major.minor.patch".
ATTN_API const char* version();

}  // namespace attn
