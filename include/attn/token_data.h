#pragma once

/// Tokens to train on: a memory-mapped file of ids, its windows, and an order to visit them in.
///
/// @code
/// const auto file = std::filesystem::temp_directory_path() / "attn_example.tokens";
/// attn::TokenCacheWriter writer(file, /*vocab_size=*/256);
/// writer.append({3, 1, 4, 1, 5, 9});
/// writer.commit(/*hash=*/attn::content_hash("the text"));
/// const attn::TokenCache cache(file);
/// const attn::ShuffledOrder order(cache.windows(4), /*seed=*/0, /*epoch=*/0);  // of 2 windows
/// attn::TokenBatch batch = cache.batch({order[0], order[1]}, 4);  // [2, 4] each
/// std::filesystem::remove(file);
/// @endcode

#include <attn/export.h>
#include <attn/functional.h>

#include <c10/util/ArrayRef.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace attn {

namespace weights {
class MappedFile;
class OutputFile;
}  // namespace weights

/// FNV-1a's state before the first byte.
inline constexpr uint64_t kContentHashStart = 0xcbf29ce484222325;

/// FNV-1a, 64 bit (Fowler, Noll & Vo). Chunks chain:
/// content_hash(b, content_hash(a)) == content_hash(a + b). It tells files apart, but does not
/// withstand someone who wants two to be alike.
ATTN_API uint64_t content_hash(std::string_view bytes, uint64_t state = kContentHashStart);

/// inputs [B, L] and targets [B, L], the token after each; int64.
struct TokenBatch {
  Tensor inputs;
  Tensor targets;
};

/// A file of token ids, mapped read-only: opening is fast and pages are read when touched. The file
/// may be replaced meanwhile but not truncated or written in place. Several threads may share it.
///
/// Little-endian, 40 bytes and then the ids: the magic "attn ids", version 1 and bytes per id (1, 2
/// or 4) as uint32, vocab_size, count and hash as uint64.
class ATTN_API TokenCache {
 public:
  /// @throws c10::ValueError, which names the file, if it can't be read, is another kind of file,
  /// of another version or damaged, or has not the size that its header says.
  explicit TokenCache(const std::filesystem::path& path);

  int64_t size() const { return size_; }  ///< number of tokens, N
  int64_t vocab_size() const { return vocab_size_; }
  uint64_t hash() const { return hash_; }  ///< as given to `TokenCacheWriter::commit`
  int64_t bytes_per_token() const { return bytes_per_token_; }

  /// Ids [count] int64 from `begin` on.
  /// @throws c10::ValueError unless [begin, begin + count) is in [0, size()).
  Tensor tokens(int64_t begin, int64_t count) const;

  /// How many windows of `length` tokens there are that a token follows: N - length.
  /// @throws c10::ValueError, which names the file and what it takes, if there is none.
  int64_t windows(int64_t length) const;

  /// The windows of L = `length` tokens that begin at `positions`, and the same one token later.
  /// @throws c10::ValueError as `windows`, or if a position is not in [0, windows(length)).
  TokenBatch batch(at::IntArrayRef positions, int64_t length) const;

 private:
  void read(int64_t begin, int64_t count, int64_t* out) const;

  std::shared_ptr<const weights::MappedFile> file_;
  int64_t size_ = 0;
  int64_t vocab_size_ = 0;
  uint64_t hash_ = 0;
  int64_t bytes_per_token_ = 0;
};

/// Writes a `TokenCache`'s file, a piece at a time: memory does not grow. The file is written
/// beside its place and renamed by `commit`; without a commit nothing is left, and an old file
/// stays.
class ATTN_API TokenCacheWriter {
 public:
  /// Ids take 1 byte for a vocab_size up to 256, 2 up to 65536, else 4.
  /// @throws c10::ValueError unless vocab_size is in [1, 2^32]; c10::Error, as all of it, when the
  /// system refuses.
  TokenCacheWriter(const std::filesystem::path& path, int64_t vocab_size);
  ~TokenCacheWriter();
  TokenCacheWriter(const TokenCacheWriter&) = delete;
  TokenCacheWriter& operator=(const TokenCacheWriter&) = delete;

  /// @throws c10::ValueError, with nothing appended, if an id is not in [0, vocab_size).
  void append(at::IntArrayRef ids);
  int64_t size() const { return size_; }  ///< ids so far
  /// Puts the file in its place. `hash` tells what the ids were made from: content and tokenizer.
  void commit(uint64_t hash);

 private:
  void flush();

  std::unique_ptr<weights::OutputFile> file_;  // null once committed
  std::vector<char> buffer_;
  int64_t size_ = 0;
  int64_t vocab_size_;
  int64_t bytes_per_token_;
};

/// A pseudo-random permutation of [0, n) that takes no memory: a Feistel network over the next
/// power of 4, walked until it is below n (Black & Rogaway 2002). The same on every machine for the
/// same n, seed and epoch. Not for cryptography.
class ATTN_API ShuffledOrder {
 public:
  /// @throws c10::ValueError unless n is in [1, 2^62].
  ShuffledOrder(int64_t n, uint64_t seed, uint64_t epoch);

  int64_t size() const { return n_; }
  /// The i-th.
  /// @throws c10::ValueError unless i is in [0, n).
  int64_t operator[](int64_t i) const;

 private:
  static constexpr int kRounds = 8;
  int64_t n_;
  int half_bits_;
  std::array<uint64_t, kRounds> keys_;
};

}  // namespace attn
