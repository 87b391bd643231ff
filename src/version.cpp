#include "attn/version.h"

namespace attn {

const char* version() {
  return ATTN_VERSION;
}

}  // namespace attn
