#include "attn/token_data.h"

#include "weights/mapped_file.h"
#include "weights/output_file.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace attn {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

constexpr std::array<char, 8> kMagic = {'a', 't', 't', 'n', ' ', 'i', 'd', 's'};
constexpr uint32_t kVersion = 1;
constexpr size_t kBufferBytes = size_t{1} << 20;

struct Header {
  std::array<char, 8> magic;
  uint32_t version;
  uint32_t bytes_per_token;
  uint64_t vocab_size;
  uint64_t count;
  uint64_t hash;
};
static_assert(sizeof(Header) == 40 && std::is_trivially_copyable_v<Header>);
static_assert(sizeof(Header) % sizeof(uint32_t) == 0, "the ids behind it are aligned");

constexpr int64_t kMostVocab = int64_t{1} << 32;

int64_t bytes_for(int64_t vocab_size) {
  if (vocab_size <= 1 << 8) return 1;
  return vocab_size <= 1 << 16 ? 2 : 4;
}

template <typename Stored>
void widen(const std::byte* from, int64_t count, int64_t* out) {
  const auto* ids = reinterpret_cast<const Stored*>(from);
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int64_t>(ids[i]);
}

// splitmix64's finaliser (Steele, Lea & Flood 2014): every bit depends on every other.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;  // splitmix64's increment, 2^64 / phi

}  // namespace

uint64_t content_hash(std::string_view bytes, uint64_t state) {
  for (const char byte : bytes) {
    state = (state ^ static_cast<unsigned char>(byte)) * 0x100000001b3;  // FNV's 64-bit prime
  }
  return state;
}

// ---- TokenCache

TokenCache::TokenCache(const std::filesystem::path& path)
    : file_(std::make_shared<const weights::MappedFile>(path)) {
  const auto& name = file_->name();
  Header header = {};
  TORCH_CHECK_VALUE(file_->size() >= sizeof header, name,
                    " must be a file of tokens, which has at least ", sizeof header, " bytes, got ",
                    file_->size());
  std::memcpy(&header, file_->data(), sizeof header);
  TORCH_CHECK_VALUE(header.magic == kMagic, name,
                    " must be a file of tokens, got other first bytes");
  TORCH_CHECK_VALUE(header.version == kVersion, name, " must be of version ", kVersion, ", got ",
                    header.version);
  TORCH_CHECK_VALUE(header.vocab_size >= 1 && header.vocab_size <= uint64_t{kMostVocab}, name,
                    ": vocab_size must be in [1, 2^32], got ", header.vocab_size);
  vocab_size_ = static_cast<int64_t>(header.vocab_size);
  bytes_per_token_ = bytes_for(vocab_size_);
  TORCH_CHECK_VALUE(header.bytes_per_token == static_cast<uint64_t>(bytes_per_token_), name,
                    ": ids of vocab_size ", vocab_size_, " must have ", bytes_per_token_,
                    " bytes each, got ", header.bytes_per_token);
  // By division: a hostile count times its size may overflow.
  const uint64_t bytes = file_->size() - sizeof header;
  const auto width = static_cast<uint64_t>(bytes_per_token_);
  TORCH_CHECK_VALUE(bytes % width == 0 && bytes / width == header.count, name, " must hold ",
                    header.count, " ids of ", width, " bytes, as its header says, got ", bytes,
                    " bytes of ids");
  size_ = static_cast<int64_t>(header.count);
  hash_ = header.hash;
}

void TokenCache::read(int64_t begin, int64_t count, int64_t* out) const {
  const auto* from = file_->data() + sizeof(Header) + begin * bytes_per_token_;
  switch (bytes_per_token_) {
    case 1:
      return widen<uint8_t>(from, count, out);
    case 2:
      return widen<uint16_t>(from, count, out);
    default:
      return widen<uint32_t>(from, count, out);
  }
}

Tensor TokenCache::tokens(int64_t begin, int64_t count) const {
  TORCH_CHECK_VALUE(begin >= 0 && begin <= size_ && count >= 0 && count <= size_ - begin,
                    "begin and count must be in the ", size_, " tokens of ", file_->name(),
                    ", got ", begin, " and ", count);
  auto ids = at::empty({count}, at::kLong);
  read(begin, count, ids.mutable_data_ptr<int64_t>());
  return ids;
}

int64_t TokenCache::windows(int64_t length) const {
  TORCH_CHECK_VALUE(length >= 1, "length must be at least 1, got ", length);
  TORCH_CHECK_VALUE(size_ > length, file_->name(), " must have more than ", length,
                    " tokens (a window and the token after it), got ", size_);
  return size_ - length;
}

TokenBatch TokenCache::batch(at::IntArrayRef positions, int64_t length) const {
  const int64_t count = windows(length);
  for (const int64_t position : positions) {
    TORCH_CHECK_VALUE(position >= 0 && position < count, "positions must be in [0, ", count,
                      "), got ", position);
  }
  const auto B = static_cast<int64_t>(positions.size());
  TokenBatch batch{at::empty({B, length}, at::kLong), at::empty({B, length}, at::kLong)};
  auto* input = batch.inputs.mutable_data_ptr<int64_t>();
  auto* target = batch.targets.mutable_data_ptr<int64_t>();
  for (const int64_t position : positions) {
    read(position, length, input);
    read(position + 1, length, target);
    input += length;
    target += length;
  }
  return batch;
}

// ---- TokenCacheWriter

TokenCacheWriter::TokenCacheWriter(const std::filesystem::path& path, int64_t vocab_size)
    : vocab_size_(vocab_size) {
  TORCH_CHECK_VALUE(vocab_size >= 1 && vocab_size <= kMostVocab,
                    "vocab_size must be in [1, 2^32], got ", vocab_size);
  bytes_per_token_ = bytes_for(vocab_size);
  file_ = std::make_unique<weights::OutputFile>(path);
  const Header unknown = {};  // written over by commit
  file_->write(&unknown, sizeof unknown);
  buffer_.reserve(kBufferBytes);
}

TokenCacheWriter::~TokenCacheWriter() = default;

void TokenCacheWriter::append(at::IntArrayRef ids) {
  TORCH_CHECK(file_ != nullptr, "ids must be appended before commit, got them after it");
  for (const int64_t id : ids) {
    TORCH_CHECK_VALUE(id >= 0 && id < vocab_size_, "ids must be in [0, ", vocab_size_, "), got ",
                      id);
  }
  const auto width = static_cast<size_t>(bytes_per_token_);
  for (const int64_t id : ids) {
    if (buffer_.size() + width > kBufferBytes) flush();
    const auto* bytes = reinterpret_cast<const char*>(&id);  // little-endian: the low ones first
    buffer_.insert(buffer_.end(), bytes, bytes + width);
  }
  size_ += static_cast<int64_t>(ids.size());
}

void TokenCacheWriter::flush() {
  file_->write(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void TokenCacheWriter::commit(uint64_t hash) {
  TORCH_CHECK(file_ != nullptr, "a file must be committed once, got a second commit");
  flush();
  const Header header = {kMagic,
                         kVersion,
                         static_cast<uint32_t>(bytes_per_token_),
                         static_cast<uint64_t>(vocab_size_),
                         static_cast<uint64_t>(size_),
                         hash};
  file_->overwrite(0, &header, sizeof header);
  file_->commit();
  file_.reset();
}

// ---- ShuffledOrder

ShuffledOrder::ShuffledOrder(int64_t n, uint64_t seed, uint64_t epoch) : n_(n) {
  TORCH_CHECK_VALUE(n >= 1 && n <= int64_t{1} << 62, "n must be in [1, 2^62], got ", n);
  const int bits = std::bit_width(static_cast<uint64_t>(n - 1));
  half_bits_ = std::max(1, (bits + 1) / 2);
  uint64_t state = mixed(mixed(seed + kGolden) ^ (epoch + kGolden));
  for (auto& key : keys_) key = mixed(state += kGolden);
}

int64_t ShuffledOrder::operator[](int64_t i) const {
  TORCH_CHECK_VALUE(i >= 0 && i < n_, "i must be in [0, ", n_, "), got ", i);
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  auto x = static_cast<uint64_t>(i);
  // The network permutes [0, 4^half_bits), at most 4 n: from inside [0, n) it comes back into it.
  do {
    uint64_t left = x >> half_bits_, right = x & mask;
    for (const uint64_t key : keys_) {
      // The high bits: a product's low ones depend on too little.
      const uint64_t next = left ^ (mixed(right + key) >> (64 - half_bits_));
      left = right;
      right = next;
    }
    x = left << half_bits_ | right;
  } while (x >= static_cast<uint64_t>(n_));
  return static_cast<int64_t>(x);
}

}  // namespace attn
