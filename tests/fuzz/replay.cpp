// Runs a fuzz target over the files of a folder, and over every cut of the small ones.

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  constexpr size_t kSmall = 4096;
  if (argc != 2) {
    std::fputs("usage: replay FOLDER\n", stderr);
    return 2;
  }
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
    LLVMFuzzerTestOneInput(data, bytes.size());
    for (size_t size = 0; size < bytes.size() && bytes.size() <= kSmall; size += 7) {
      LLVMFuzzerTestOneInput(data, size);
    }
    ++files;
  }
  std::printf("%d files\n", files);
  return files > 0 ? 0 : 1;  // an empty corpus is no test
}
