// config.json, a zero byte and model.safetensors.

#include <attn/model_folder.h>

#include <c10/util/Exception.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <unistd.h>

namespace {

// One folder for the process, gone with it.
class Folder {
 public:
  Folder() {
    std::string name = "/tmp/attn-fuzz-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::filesystem::path path;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const auto zero = std::min(input.find('\0'), size);
  std::ofstream(folder.path / "config.json", std::ios::binary) << input.substr(0, zero);
  std::ofstream(folder.path / "model.safetensors", std::ios::binary)
      << input.substr(std::min(zero + 1, size));
  try {
    attn::load_language_model(folder.path);
  } catch (const c10::ValueError&) {
  }
  return 0;
}
