// config.json, a zero byte and model.safetensors.

#include "../support/temporary_folder.h"

#include <attn/model_folder.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <fstream>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const attn::testing::TemporaryFolder folder;  // of the process
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const auto zero = std::min(input.find('\0'), size);
  std::ofstream(folder / "config.json", std::ios::binary) << input.substr(0, zero);
  std::ofstream(folder / "model.safetensors", std::ios::binary)
      << input.substr(std::min(zero + 1, size));
  try {
    attn::load_language_model(folder.path());
  } catch (const c10::ValueError&) {
  }
  return 0;
}
