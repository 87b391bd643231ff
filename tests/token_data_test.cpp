#include "attn/token_data.h"

#include "support/all_close.h"
#include "support/expect_error.h"
#include "support/mentions.h"
#include "support/temporary_folder.h"

#include <ATen/Functions.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

namespace attn::testing {
namespace {

void write(const std::filesystem::path& path, const std::vector<int64_t>& ids, int64_t vocab_size,
           uint64_t hash = 0) {
  TokenCacheWriter writer(path, vocab_size);
  writer.append(ids);
  writer.commit(hash);
}

std::vector<int64_t> counting(int64_t count, int64_t from = 0) {
  std::vector<int64_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), from);
  return ids;
}

torch::Tensor tensor(const std::vector<int64_t>& ids) {
  return torch::tensor(ids, torch::kLong);
}

// ---- content_hash

TEST(ContentHash, IsFnv1a) {  // the vectors of draft-eastlake-fnv, appendix C
  EXPECT_EQ(content_hash(""), 0xcbf29ce484222325);
  EXPECT_EQ(content_hash("a"), 0xaf63dc4c8601ec8c);
  EXPECT_EQ(content_hash("foobar"), 0x85944171f73967e8);
  EXPECT_EQ(content_hash("bar", content_hash("foo")), content_hash("foobar"));
  EXPECT_NE(content_hash(std::string_view("\0", 1)), content_hash(""));
  EXPECT_NE(content_hash("\xff"), content_hash("\x7f"));
}

// ---- TokenCache

TEST(TokenCache, HoldsWhatWasWritten) {
  const TemporaryFolder folder;
  const auto path = folder / "ids";
  for (const auto& [vocab_size, bytes] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {256, 1}, {257, 2}, {65536, 2}, {65537, 4}, {int64_t{1} << 32, 4}}) {
    const std::vector<int64_t> ids = {0, vocab_size - 1, vocab_size / 2, 0, vocab_size - 1};
    write(path, ids, vocab_size, 0xfedcba9876543210);
    const TokenCache cache(path);
    EXPECT_EQ(cache.size(), 5);
    EXPECT_EQ(cache.vocab_size(), vocab_size);
    EXPECT_EQ(cache.bytes_per_token(), bytes);
    EXPECT_EQ(cache.hash(), 0xfedcba9876543210);
    EXPECT_EQ(std::filesystem::file_size(path), 40 + 5 * static_cast<uintmax_t>(bytes));
    EXPECT_TRUE(all_equal(cache.tokens(0, 5), tensor(ids)));
    EXPECT_TRUE(all_equal(cache.tokens(1, 2), tensor({ids[1], ids[2]})));
    EXPECT_EQ(cache.tokens(5, 0).numel(), 0);
  }
}

// In pieces, over more than the writer's buffer.
TEST(TokenCache, HoldsManyPieces) {
  const TemporaryFolder folder;
  const auto path = folder / "ids";
  TokenCacheWriter writer(path, 100'000);
  int64_t written = 0;
  for (int64_t piece = 0; written < 600'000; ++piece) {
    auto ids = counting(piece % 1000, written);
    for (auto& id : ids) id %= 100'000;
    writer.append(ids);
    written += piece % 1000;
    EXPECT_EQ(writer.size(), written);
  }
  writer.commit(1);
  const TokenCache cache(path);
  ASSERT_EQ(cache.size(), written);
  EXPECT_TRUE(torch::equal(cache.tokens(0, written), torch::arange(written).remainder(100'000)));
}

TEST(TokenCache, GivesWindowsAndTheirSuccessors) {
  const TemporaryFolder folder;
  const auto path = folder / "ids";
  write(path, counting(10, 100), 1000);
  const TokenCache cache(path);
  EXPECT_EQ(cache.windows(4), 6);
  EXPECT_EQ(cache.windows(9), 1);
  const auto batch = cache.batch({5, 0, 5}, 4);
  const auto expected =
      torch::stack({torch::arange(105, 109), torch::arange(100, 104), torch::arange(105, 109)});
  EXPECT_TRUE(all_equal(batch.inputs, expected));
  EXPECT_TRUE(all_equal(batch.targets, expected + 1));
  EXPECT_EQ(batch.inputs.scalar_type(), torch::kLong);
  EXPECT_EQ(cache.batch({}, 4).inputs.sizes(), (std::vector<int64_t>{0, 4}));

  for (const int64_t length : {10, 11}) {
    EXPECT_TRUE(mentions(value_error([&] { cache.windows(length); }),
                         {path.string(), "more than " + std::to_string(length), "got 10"}));
    EXPECT_TRUE(mentions(value_error([&] { cache.batch({0}, length); }), {"more than"}));
  }
  EXPECT_TRUE(mentions(value_error([&] { cache.windows(0); }), {"length", "got 0"}));
  EXPECT_TRUE(mentions(value_error([&] { cache.batch({6}, 4); }), {"[0, 6)", "got 6"}));
  EXPECT_TRUE(mentions(value_error([&] { cache.batch({-1}, 4); }), {"[0, 6)", "got -1"}));
  EXPECT_THROW(cache.tokens(-1, 2), c10::ValueError);
  EXPECT_THROW(cache.tokens(0, -1), c10::ValueError);
  EXPECT_THROW(cache.tokens(11, 0), c10::ValueError);
  EXPECT_TRUE(mentions(value_error([&] { cache.tokens(8, 3); }), {path.string(), "8 and 3"}));
  EXPECT_THROW(cache.tokens(1, std::numeric_limits<int64_t>::max()), c10::ValueError);
}

TEST(TokenCache, KeepsItsFileThroughReplacement) {
  const TemporaryFolder folder;
  const auto path = folder / "ids";
  write(path, {1, 2, 3}, 10);
  const TokenCache old(path);
  write(path, {4, 5}, 10);
  EXPECT_TRUE(all_equal(old.tokens(0, 3), tensor({1, 2, 3})));
  EXPECT_TRUE(all_equal(TokenCache(path).tokens(0, 2), tensor({4, 5})));
}

TEST(TokenCache, RefusesWhatIsNoneOrDamaged) {
  const TemporaryFolder folder;
  const auto path = folder / "ids";
  write(path, counting(6), 300);
  const auto good = read_bytes(path);  // 40 + 12 bytes
  const auto refused = [&](const std::string& bytes, const std::string& part) {
    write_bytes(path, bytes);
    EXPECT_TRUE(mentions(value_error([&] { TokenCache{path}; }), {path.string(), part, "got"}));
  };
  for (size_t size = 0; size < good.size(); ++size)
    refused(good.substr(0, size), size < 40 ? "at least 40 bytes" : "must hold 6 ids");
  refused(good + 'x', "must hold 6 ids");
  refused(good + "xx", "must hold 6 ids");
  const auto with = [&](size_t offset, uint64_t value, size_t size) {
    auto bytes = good;
    std::memcpy(bytes.data() + offset, &value, size);
    return bytes;
  };
  refused(with(0, 'x', 1), "other first bytes");
  refused(with(8, 2, 4), "version 1");
  refused(with(12, 1, 4), "2 bytes each");
  refused(with(12, 0, 4), "2 bytes each");
  refused(with(16, 0, 8), "vocab_size");
  refused(with(16, (uint64_t{1} << 32) + 1, 8), "vocab_size");
  refused(with(16, ~uint64_t{0}, 8), "vocab_size");
  refused(with(16, 256, 8), "1 bytes each");
  refused(with(24, 7, 8), "must hold 7 ids");
  refused(with(24, 6 + (uint64_t{1} << 63), 8), "must hold");  // times 2 it would be 12 bytes
  EXPECT_TRUE(mentions(value_error([&] { TokenCache{folder / "none"}; }), {"none", "readable"}));
  EXPECT_TRUE(mentions(value_error([&] { TokenCache{folder.path()}; }), {"regular file"}));
}

TEST(TokenCacheWriter, LeavesNothingWithoutACommit) {
  const TemporaryFolder folder;
  const auto path = folder / "ids";
  {
    TokenCacheWriter writer(path, 10);
    writer.append({1, 2, 3});
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_EQ(folder.entries(), 0U);
  write(path, {1}, 10);
  { TokenCacheWriter(path, 10).append({2, 3}); }
  EXPECT_EQ(TokenCache(path).size(), 1);
  EXPECT_EQ(folder.entries(), 1U);
}

TEST(TokenCacheWriter, RejectsWhatDoesNotFit) {
  const TemporaryFolder folder;
  const auto path = folder / "ids";
  EXPECT_TRUE(mentions(value_error([&] { TokenCacheWriter(path, 0); }), {"vocab_size", "got 0"}));
  EXPECT_THROW(TokenCacheWriter(path, (int64_t{1} << 32) + 1), c10::ValueError);
  TokenCacheWriter writer(path, 10);
  writer.append({9});
  EXPECT_TRUE(mentions(value_error([&] { writer.append({1, 10}); }), {"[0, 10)", "got 10"}));
  EXPECT_TRUE(mentions(value_error([&] { writer.append({1, -1}); }), {"[0, 10)", "got -1"}));
  writer.commit(0);
  EXPECT_TRUE(all_equal(TokenCache(path).tokens(0, 1), tensor({9})));  // nothing of the refused
  EXPECT_EQ(TokenCache(path).size(), 1);
  EXPECT_THROW(writer.append({1}), c10::Error);
  EXPECT_THROW(writer.commit(0), c10::Error);
  EXPECT_THROW(TokenCacheWriter(folder / "no/such/folder", 10), c10::Error);
  write(path, {}, 10);
  EXPECT_EQ(TokenCache(path).size(), 0);
  EXPECT_THROW(TokenCache(path).windows(1), c10::ValueError);
}

// ---- ShuffledOrder

std::vector<int64_t> order_of(int64_t n, uint64_t seed, uint64_t epoch) {
  const ShuffledOrder order(n, seed, epoch);
  EXPECT_EQ(order.size(), n);
  std::vector<int64_t> all;
  for (int64_t i = 0; i < n; ++i) all.push_back(order[i]);
  return all;
}

TEST(ShuffledOrder, IsAPermutation) {
  for (int64_t n = 1; n <= 200; ++n) {
    auto all = order_of(n, 1, static_cast<uint64_t>(n));
    std::sort(all.begin(), all.end());
    ASSERT_EQ(all, counting(n)) << n;
  }
  for (const int64_t n : {65'535, 65'536, 65'537, 300'000}) {
    auto all = order_of(n, 2, 0);
    std::sort(all.begin(), all.end());
    ASSERT_EQ(all, counting(n)) << n;
  }
}

TEST(ShuffledOrder, TakesAnySize) {
  for (const int64_t n : {(int64_t{1} << 40) + 1, (int64_t{1} << 61) + 1, int64_t{1} << 62}) {
    const ShuffledOrder order(n, 3, 4);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 1000; ++i) {
      for (const int64_t x : {order[i], order[n - 1 - i]}) {
        EXPECT_GE(x, 0);
        EXPECT_LT(x, n);
        EXPECT_TRUE(seen.insert(x).second);
      }
    }
  }
}

TEST(ShuffledOrder, DependsOnSeedAndEpochOnly) {
  const auto order = order_of(100, 5, 6);
  EXPECT_EQ(order_of(100, 5, 6), order);
  EXPECT_NE(order_of(100, 5, 7), order);
  EXPECT_NE(order_of(100, 6, 6), order);
  EXPECT_NE(order_of(100, 6, 5), order);
  std::set<std::vector<int64_t>> all;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    for (uint64_t epoch = 0; epoch < 10; ++epoch) all.insert(order_of(100, seed, epoch));
  }
  EXPECT_EQ(all.size(), 100U);
}

// Every element comes to every place about equally often.
TEST(ShuffledOrder, IsWithoutPreference) {
  constexpr int64_t kOrders = 20'000;
  for (const int64_t n : {3, 10, 16}) {
    std::vector<double> counts(static_cast<size_t>(n * n), 0.0);
    for (int64_t epoch = 0; epoch < kOrders; ++epoch) {
      const ShuffledOrder order(n, 8, static_cast<uint64_t>(epoch));
      for (int64_t i = 0; i < n; ++i) counts[static_cast<size_t>(i * n + order[i])] += 1.0;
    }
    const double expected = static_cast<double>(kOrders) / static_cast<double>(n);
    double chi_square = 0.0;
    for (const double count : counts)
      chi_square += (count - expected) * (count - expected) / expected;
    // Its mean is (n - 1)^2 for random permutations, its deviation about (n - 1) sqrt(2).
    const auto d = static_cast<double>(n - 1);
    EXPECT_LT(chi_square, d * d + 6 * d * std::sqrt(2.0)) << n;
  }
}

TEST(ShuffledOrder, RejectsWhatDoesNotFit) {
  EXPECT_TRUE(mentions(value_error([] { ShuffledOrder(0, 0, 0); }), {"n must be", "got 0"}));
  EXPECT_THROW(ShuffledOrder((int64_t{1} << 62) + 1, 0, 0), c10::ValueError);
  const ShuffledOrder order(3, 0, 0);
  EXPECT_TRUE(mentions(value_error([&] { order[3]; }), {"[0, 3)", "got 3"}));
  EXPECT_THROW(order[-1], c10::ValueError);
}

}  // namespace
}  // namespace attn::testing
