#pragma once

#include <attn/export.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace attn {

/// GPT-2's byte-level BPE: text is split by GPT-2's pattern, every word's bytes are merged in the
/// order of the merges. Ids equal those of the Python package `tokenizers`.
///
/// Nothing is unknown: every byte has a token, so decode(encode(x)) == x for any bytes x (without
/// `add_prefix_space`). Runs of bytes that are no UTF-8 are words of their own. Immutable: copies
/// share the tables, threads may share an object.
///
/// With GPT-2's files, `ByteLevelBPE::from_folder("gpt2").encode("Hello, world")` is {15496, 11,
/// 995}.
class ATTN_API ByteLevelBPE {
 public:
  /// GPT-2's own files. `<|endoftext|>`, if in the vocabulary, is matched whole in texts.
  /// @throws c10::ValueError naming the file and the entry or line: not JSON, ids that are not
  /// 0 .. V - 1, a byte without a token, merges of unknown tokens.
  static ByteLevelBPE from_files(const std::filesystem::path& vocab,
                                 const std::filesystem::path& merges);

  /// The file of `tokenizers`; its added tokens are matched whole in texts, leftmost and longest.
  /// @throws c10::ValueError as `from_files`, and naming every option that asks for another
  /// algorithm (a normaliser, another pre-tokeniser, dropout, ...).
  static ByteLevelBPE from_tokenizer_json(const std::filesystem::path& path);

  /// The folder's tokenizer.json, or else its vocab.json and merges.txt.
  static ByteLevelBPE from_folder(const std::filesystem::path& folder);

  /// Bytes as they are: 256 tokens, id = byte, no merges.
  static ByteLevelBPE bytes();

  /// Writes vocab.json and merges.txt into the folder, which is there, each beside and renamed.
  /// @throws c10::ValueError if that would lose something: added tokens other than
  /// `<|endoftext|>`, a prefix space.
  void save(const std::filesystem::path& folder) const;

  std::vector<int64_t> encode(std::string_view text) const;

  /// The tokens' bytes; ids that no token has are skipped (a model's vocabulary may be padded).
  std::string decode(std::span<const int64_t> ids) const;

  /// V: ids are 0 .. V - 1, added tokens included.
  int64_t vocab_size() const;

  /// By the spelling of the vocabulary file, where bytes are written as printable characters.
  std::optional<int64_t> token_to_id(std::string_view token) const;
  std::optional<std::string> id_to_token(int64_t id) const;

 private:
  struct Tables;
  explicit ByteLevelBPE(std::shared_ptr<const Tables> tables) : tables_(std::move(tables)) {}

  std::shared_ptr<const Tables> tables_;
};

/// Decodes token by token and gives out whole UTF-8 characters only; the parts joined are what
/// `decode` gives for all ids.
class ATTN_API StreamingDecoder {
 public:
  explicit StreamingDecoder(ByteLevelBPE tokenizer) : tokenizer_(std::move(tokenizer)) {}

  /// What has become whole with this token; the start of a character is held back.
  std::string push(int64_t id);

  /// What was held back: the bytes of a character that was never completed.
  std::string finish();

 private:
  ByteLevelBPE tokenizer_;
  std::string pending_;
};

}  // namespace attn
