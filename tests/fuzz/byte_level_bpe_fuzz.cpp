// tokenizer.json; or vocab.json, a zero byte and merges.txt. What is accepted must bring any bytes
// back.

#include "memory_file.h"

#include <attn/byte_level_bpe.h>

#include <c10/util/Exception.h>

#include <cstdlib>

namespace {

void check(const attn::ByteLevelBPE& tokenizer, std::string_view text, bool may_add_space) {
  const auto ids = tokenizer.encode(text);
  for (const auto id : ids) {
    if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
  }
  auto decoded = tokenizer.decode(ids);
  if (!may_add_space && decoded != text) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const auto zero = input.find('\0');
  try {
    if (zero == std::string_view::npos) {
      const attn::testing::MemoryFile file(input);
      check(attn::ByteLevelBPE::from_tokenizer_json(file.path()), input.substr(0, 1000), true);
    } else {
      const attn::testing::MemoryFile vocab(input.substr(0, zero)), merges(input.substr(zero + 1));
      check(attn::ByteLevelBPE::from_files(vocab.path(), merges.path()), input.substr(0, 1000),
            false);
    }
  } catch (const c10::ValueError&) {
  }
  check(attn::ByteLevelBPE::bytes(), input.substr(0, 1000), false);
  return 0;
}
