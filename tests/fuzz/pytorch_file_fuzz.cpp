// Any bytes as a weights file whose kind its content tells; the corpus holds PyTorch's zip format.

#include "memory_file.h"
#include "touch.h"

#include <attn/weights.h>

#include <c10/util/Exception.h>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const attn::testing::MemoryFile file({reinterpret_cast<const char*>(data), size});
  try {
    attn::testing::touch(attn::load_weights(file.path()));
  } catch (const c10::ValueError&) {
  }
  return 0;
}
