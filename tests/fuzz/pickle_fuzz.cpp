// Any bytes as the pickle in PyTorch's format.

#include "weights/pickle.h"

#include <c10/util/Exception.h>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    attn::weights::read_pickle({reinterpret_cast<const char*>(data), size}, "input")
        .root.describe();
  } catch (const c10::ValueError&) {
  }
  return 0;
}
