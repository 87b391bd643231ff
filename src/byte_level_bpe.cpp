#include "attn/byte_level_bpe.h"

#include "json.h"
#include "weights/output_file.h"

#include <c10/util/Exception.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <pcre2.h>
#include <queue>
#include <set>
#include <unordered_map>
#include <utility>

namespace attn {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kEndOfText = "<|endoftext|>";

// --- UTF-8 and the byte alphabet -----------------------------------------------------------------

unsigned char byte_at(std::string_view text, size_t at) {
  return static_cast<unsigned char>(text[at]);
}

// How many bytes a character with this first byte has; 0 if no character starts so.
size_t announced_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) return 3;
  if (lead >= 0xF0 && lead <= 0xF4) return 4;
  return 0;
}

// May `second` follow `lead`? Overlong forms, surrogates and what lies beyond U+10FFFF may not.
bool may_follow(unsigned char lead, unsigned char second) {
  const unsigned char least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned char most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  return least <= second && second <= most;
}

// How many bytes from `at` on, at most a character's, are the beginning of a valid character.
size_t valid_prefix(std::string_view text, size_t at) {
  const auto lead = byte_at(text, at);
  const size_t length = announced_length(lead);
  size_t n = std::min<size_t>(length, 1);
  while (n < length && at + n < text.size()) {
    const auto next = byte_at(text, at + n);
    if (n == 1 ? !may_follow(lead, next) : (next & 0xC0) != 0x80) break;
    ++n;
  }
  return n;
}

bool valid_character(std::string_view text, size_t at) {
  const size_t length = announced_length(byte_at(text, at));
  return length > 0 && valid_prefix(text, at) == length;
}

// The length of a character at the end that has begun and may still be completed.
size_t unfinished_tail(std::string_view text) {
  for (size_t n = 1; n <= std::min<size_t>(3, text.size()); ++n) {
    const size_t at = text.size() - n;
    if (announced_length(byte_at(text, at)) > n && valid_prefix(text, at) == n) return n;
  }
  return 0;
}

std::string utf8(unsigned code_point) {  // below U+0800
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xC0 | (code_point >> 6)),
          static_cast<char>(0x80 | (code_point & 0x3F))};
}

// GPT-2 writes a printable Latin-1 byte as itself, and the others as U+0100, U+0101, ... in turn.
struct ByteAlphabet {
  std::array<std::string, 256> spelling;
  std::unordered_map<std::string, char> byte;

  ByteAlphabet() {
    unsigned next = 0x100;
    for (unsigned b = 0; b < 256; ++b) {
      const bool printable =
          (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      spelling[b] = utf8(printable ? b : next++);
      byte.emplace(spelling[b], static_cast<char>(b));
    }
  }
};

const ByteAlphabet& alphabet() {
  static const ByteAlphabet instance;
  return instance;
}

// A token that holds other characters than the alphabet's stands for itself, as in `tokenizers`.
std::string bytes_of(const std::string& token) {
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const size_t length = std::max<size_t>(1, valid_prefix(token, at));
    const auto found = alphabet().byte.find(token.substr(at, length));
    if (found == alphabet().byte.end()) return token;
    bytes += found->second;
    at += length;
  }
  return bytes;
}

// --- Splitting into words ------------------------------------------------------------------------

// The pattern published with GPT-2. Unicode's White_Space is spelt out: PCRE2's \s also has U+180E.
// Possessive quantifiers change nothing where nothing follows, and need no stack.
#define ATTN_WHITE_SPACE                                                                   \
  "\\t-\\r \\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}" \
  "\\x{3000}"
constexpr const char* kPattern =
    "'s|'t|'re|'ve|'m|'ll|'d"
    "| ?\\p{L}++| ?\\p{N}++| ?[^" ATTN_WHITE_SPACE
    "\\p{L}\\p{N}]++"
    "|[" ATTN_WHITE_SPACE "]+(?![^" ATTN_WHITE_SPACE "])|[" ATTN_WHITE_SPACE "]++";
#undef ATTN_WHITE_SPACE

class WordPattern {
 public:
  WordPattern() {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(kPattern), PCRE2_ZERO_TERMINATED,
                              PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &offset, nullptr));
    TORCH_CHECK(code_ != nullptr, "PCRE2 must compile the word pattern, got error ", error, " at ",
                offset);
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);  // where there is no JIT, it interprets
  }

  // Calls word(std::string_view) for the words of valid UTF-8, in order; they cover it.
  template <typename Word>
  void split(std::string_view text, Word&& word) const {
    const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> match(
        pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
    TORCH_CHECK(match != nullptr, "PCRE2 must have memory for a match, got none");
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    for (size_t at = 0; at < text.size();) {
      const int found = pcre2_match(code_.get(), subject, text.size(), at, PCRE2_NO_UTF_CHECK,
                                    match.get(), nullptr);
      TORCH_CHECK(found > 0, "PCRE2 must find a word at byte ", at, ", got error ", found);
      const size_t end = pcre2_get_ovector_pointer(match.get())[1];
      word(text.substr(at, end - at));
      at = end;
    }
  }

 private:
  struct Free {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  };
  std::unique_ptr<pcre2_code, Free> code_;
};

const WordPattern& word_pattern() {
  static const WordPattern instance;
  return instance;
}

// Words of any bytes: what is no UTF-8 forms words of its own.
template <typename Word>
void split_bytes(std::string_view text, Word&& word) {
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < text.size() && valid_character(text, end)) {
      end += announced_length(byte_at(text, end));
    }
    if (end > at) word_pattern().split(text.substr(at, end - at), word);
    at = end;
    while (end < text.size() && !valid_character(text, end)) ++end;
    if (end > at) word(text.substr(at, end - at));
    at = end;
  }
}

// --- Merging -------------------------------------------------------------------------------------

}  // namespace

namespace bpe {  // with linkage, as ByteLevelBPE::Tables, which holds them

struct Merge {
  uint64_t pair;  // left << 32 | right
  uint32_t rank;
  uint32_t id;
};

inline uint64_t pair_of(uint32_t left, uint32_t right) {
  return (uint64_t{left} << 32) | right;
}

// Open addressing in one array, at most half full.
class MergeTable {
 public:
  explicit MergeTable(size_t merges) : bits_(1) {
    while ((size_t{1} << bits_) < 2 * merges + 1) ++bits_;
    slots_.assign(size_t{1} << bits_, Merge{kEmpty, 0, 0});
  }

  // False if the pair is there already.
  bool insert(const Merge& merge) {
    auto& slot = slots_[slot_of(merge.pair)];
    if (slot.pair != kEmpty) return false;
    slot = merge;
    return true;
  }

  const std::vector<Merge>& slots() const { return slots_; }
  static bool is_empty(const Merge& slot) { return slot.pair == kEmpty; }

  const Merge* find(uint32_t left, uint32_t right) const {
    const auto& slot = slots_[slot_of(pair_of(left, right))];
    return slot.pair == kEmpty ? nullptr : &slot;
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};  // no pair: ids are below 2^31

  size_t slot_of(uint64_t pair) const {
    size_t at = (pair * 0x9E3779B97F4A7C15U) >> (64 - bits_);  // Fibonacci hashing
    while (slots_[at].pair != kEmpty && slots_[at].pair != pair) {
      at = (at + 1) & (slots_.size() - 1);
    }
    return at;
  }

  int bits_;
  std::vector<Merge> slots_;
};

struct AddedToken {
  std::string content;
  uint32_t id;
};

}  // namespace bpe

namespace {

using bpe::AddedToken, bpe::Merge, bpe::MergeTable, bpe::pair_of;

// Merges a word: the lowest rank first, then the leftmost. A heap keeps long words at O(n log n).
class Merger {
 public:
  explicit Merger(const MergeTable& merges) : merges_(merges) {}

  void append(std::string_view word, const std::array<uint32_t, 256>& byte_ids,
              std::vector<int64_t>& ids) {
    symbols_.clear();
    for (size_t i = 0; i < word.size(); ++i) {
      symbols_.push_back({byte_ids[byte_at(word, i)], i == 0 ? 0 : i - 1, i + 1, true});
    }
    for (size_t i = 0; i + 1 < word.size(); ++i) offer(i);
    while (!candidates_.empty()) {
      const auto candidate = candidates_.top();
      candidates_.pop();
      if (still_there(candidate)) merge(candidate);
    }
    for (const auto& symbol : symbols_) {
      if (symbol.alive) ids.push_back(symbol.id);
    }
  }

 private:
  struct Symbol {
    uint32_t id;
    size_t previous;  // of the first symbol: itself
    size_t next;      // the end: size()
    bool alive;
  };
  struct Candidate {
    size_t left;
    Merge merge;
    bool operator<(const Candidate& other) const {  // the heap's top is the greatest
      return merge.rank != other.merge.rank ? merge.rank > other.merge.rank : left > other.left;
    }
  };

  void offer(size_t left) {
    const size_t right = symbols_[left].next;
    if (right >= symbols_.size()) return;
    if (const auto* found = merges_.find(symbols_[left].id, symbols_[right].id)) {
      candidates_.push({left, *found});
    }
  }

  bool still_there(const Candidate& candidate) const {
    const auto& left = symbols_[candidate.left];
    return left.alive && left.next < symbols_.size() &&
           pair_of(left.id, symbols_[left.next].id) == candidate.merge.pair;
  }

  void merge(const Candidate& candidate) {
    auto& left = symbols_[candidate.left];
    auto& right = symbols_[left.next];
    left.id = candidate.merge.id;
    left.next = right.next;
    right.alive = false;
    if (left.next < symbols_.size()) symbols_[left.next].previous = candidate.left;
    offer(candidate.left);
    if (candidate.left > 0) offer(symbols_[candidate.left].previous);
  }

  const MergeTable& merges_;
  std::vector<Symbol> symbols_;
  std::priority_queue<Candidate> candidates_;
};

// --- Reading files -------------------------------------------------------------------------------

std::string quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string read_file(const fs::path& path) {
  std::error_code error;
  TORCH_CHECK_VALUE(fs::is_regular_file(path, error), path.string(),
                    " must be a file that can be read, got ",
                    fs::exists(path, error) ? "something else" : "no such file");
  std::ifstream in(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  TORCH_CHECK_VALUE(in.is_open() && !in.bad(), path.string(),
                    " must be a file that can be read, got an error while reading");
  return text;
}

Json read_json(const fs::path& path) {
  auto json = parse_json(read_file(path), path.string());
  TORCH_CHECK_VALUE(json.is_object(), path.string(), " must hold a JSON object, got ",
                    json.type_name());
  return json;
}

uint32_t read_id(const Json& value, const std::string& where) {
  constexpr uint64_t kLimit = uint64_t{1} << 31;
  TORCH_CHECK_VALUE(value.is_number_unsigned() && value.get<uint64_t>() < kLimit, where,
                    ": the id must be an integer in [0, 2^31), got ",
                    value.is_number() ? value.dump() : value.type_name());
  return static_cast<uint32_t>(value.get<uint64_t>());
}

using Vocabulary = std::unordered_map<std::string, uint32_t>;

void read_vocabulary(const Json& json, const std::string& where, Vocabulary& into) {
  TORCH_CHECK_VALUE(json.is_object(), where, ": the vocabulary must be an object, got ",
                    json.type_name());
  for (const auto& [token, id] : json.items()) {
    into.emplace(token, read_id(id, where + ": token " + quoted(token)));
  }
}

// The two tokens of "left right".
std::pair<std::string, std::string> read_merge(const std::string& line, const std::string& where) {
  const auto space = line.find(' ');
  TORCH_CHECK_VALUE(space != std::string::npos && space > 0 && space + 1 < line.size() &&
                        line.find(' ', space + 1) == std::string::npos,
                    where, " must be two tokens with a space between, got ", quoted(line));
  return {line.substr(0, space), line.substr(space + 1)};
}

struct NamedMerge {
  std::string left, right, where;
};

std::vector<NamedMerge> read_merges_txt(const fs::path& path) {
  const auto text = read_file(path);
  std::vector<NamedMerge> merges;
  size_t number = 0;
  for (size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find('\n', at), text.size());
    auto line = text.substr(at, end - at);
    at = end + 1;
    ++number;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty() || line.starts_with("#version")) continue;
    const auto where = path.string() + ": line " + std::to_string(number);
    auto [left, right] = read_merge(line, where);
    merges.push_back({std::move(left), std::move(right), where});
  }
  return merges;
}

// tokenizer.json holds "left right" or, in newer files, ["left", "right"].
std::vector<NamedMerge> read_merges_json(const Json& json, const std::string& file) {
  TORCH_CHECK_VALUE(json.is_array(), file, ": model.merges must be an array, got ",
                    json.type_name());
  std::vector<NamedMerge> merges;
  for (const auto& entry : json) {
    const auto where = file + ": model.merges[" + std::to_string(merges.size()) + "]";
    if (entry.is_string()) {
      auto [left, right] = read_merge(entry.get<std::string>(), where);
      merges.push_back({std::move(left), std::move(right), where});
      continue;
    }
    TORCH_CHECK_VALUE(
        entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string(),
        where, " must be two tokens, got ", entry.type_name());
    merges.push_back({entry[0].get<std::string>(), entry[1].get<std::string>(), where});
  }
  return merges;
}

// --- What a tokenizer.json may ask for -----------------------------------------------------------

const Json& member(const Json& object, const char* key) {
  static const Json null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

std::string shown(const Json& value) {
  if (value.is_object() && member(value, "type").is_string()) return member(value, "type").dump();
  return value.is_structured() ? value.type_name() : value.dump();
}

void check_known_keys(const Json& object, const std::string& where,
                      const std::set<std::string>& known) {
  for (const auto& [key, value] : object.items()) {
    TORCH_CHECK_VALUE(known.contains(key), where, " must hold only options that are known, got ",
                      quoted(key));
  }
}

// Absent or null, or one of `allowed`.
void check_option(const Json& object, const std::string& where, const char* key,
                  std::initializer_list<Json> allowed = {}) {
  const auto& value = member(object, key);
  const bool fits =
      value.is_null() || std::find(allowed.begin(), allowed.end(), value) != allowed.end();
  TORCH_CHECK_VALUE(fits, where, ": ", key, " is not supported, got ", shown(value));
}

void check_byte_level(const Json& json, const std::string& where) {
  TORCH_CHECK_VALUE(json.is_object() && member(json, "type") == "ByteLevel", where,
                    " must be ByteLevel, got ", shown(json));
  check_known_keys(json, where, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
  check_option(json, where, "use_regex", {true});
}

void check_model(const Json& model, const std::string& where) {
  TORCH_CHECK_VALUE(model.is_object(), where, " must be an object, got ", model.type_name());
  check_known_keys(
      model, where,
      {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
       "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  check_option(model, where, "type", {"BPE"});
  check_option(model, where, "dropout");
  check_option(model, where, "continuing_subword_prefix", {""});
  check_option(model, where, "end_of_word_suffix", {""});
  check_option(model, where, "byte_fallback", {false});
  check_option(model, where, "ignore_merges", {false});
}

// ByteLevel's only moves offsets. transformers 5 writes a template that is the text alone.
void check_post_processor(const Json& json, const std::string& where) {
  if (json.is_null()) return;
  if (!json.is_object() || member(json, "type") != "TemplateProcessing") {
    check_byte_level(json, where);
    return;
  }
  check_known_keys(json, where, {"type", "single", "pair", "special_tokens"});
  const auto& parts = member(json, "single");
  const bool text_alone = parts.is_array() && parts.size() == 1 && parts[0].is_object() &&
                          parts[0].size() == 1 && parts[0].contains("Sequence");
  TORCH_CHECK_VALUE(text_alone, where, ": the template must be the text alone, got ", shown(parts));
}

// Checks all but vocabulary, merges and added tokens.
void check_pipeline(const Json& json, const std::string& file) {
  check_known_keys(json, file,
                   {"version", "truncation", "padding", "added_tokens", "normalizer",
                    "pre_tokenizer", "post_processor", "decoder", "model"});
  check_option(json, file, "truncation");
  check_option(json, file, "padding");
  check_option(json, file, "normalizer");
  check_byte_level(member(json, "pre_tokenizer"), file + ": pre_tokenizer");
  check_byte_level(member(json, "decoder"), file + ": decoder");
  check_post_processor(member(json, "post_processor"), file + ": post_processor");
  check_model(member(json, "model"), file + ": model");
}

std::vector<AddedToken> read_added_tokens(const Json& json, const std::string& file) {
  std::vector<AddedToken> added;
  if (json.is_null()) return added;
  TORCH_CHECK_VALUE(json.is_array(), file, ": added_tokens must be an array, got ",
                    json.type_name());
  for (const auto& entry : json) {
    const auto where = file + ": added_tokens[" + std::to_string(added.size()) + "]";
    TORCH_CHECK_VALUE(entry.is_object(), where, " must be an object, got ", entry.type_name());
    check_known_keys(entry, where,
                     {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    for (const auto* option : {"single_word", "lstrip", "rstrip"}) {
      check_option(entry, where, option, {false});
    }
    const auto& content = member(entry, "content");
    TORCH_CHECK_VALUE(content.is_string() && !content.get_ref<const std::string&>().empty(), where,
                      ": content must be a string that is not empty, got ", shown(content));
    added.push_back({content.get<std::string>(), read_id(member(entry, "id"), where)});
  }
  return added;
}

}  // namespace

// --- The tables ----------------------------------------------------------------------------------

struct ByteLevelBPE::Tables {
  std::string file;  // of the vocabulary, for messages
  Vocabulary ids;
  std::vector<AddedToken> added;  // longest first
  bool add_prefix_space = false;
  MergeTable merges{0};
  std::vector<std::string> spelling, bytes;  // by id
  std::array<uint32_t, 256> byte_ids{};
  std::array<bool, 256> starts_added{};

  void finish(const std::vector<NamedMerge>& named) {
    number_tokens();
    for (unsigned b = 0; b < 256; ++b) {
      const auto found = ids.find(alphabet().spelling[b]);
      TORCH_CHECK_VALUE(found != ids.end(), file,
                        " must have a token for every byte, got none for ", b, " (",
                        quoted(alphabet().spelling[b]), ")");
      byte_ids[b] = found->second;
    }
    merges = MergeTable(named.size());
    for (uint32_t rank = 0; rank < named.size(); ++rank) add_merge(named[rank], rank);
    std::stable_sort(added.begin(), added.end(), [](const auto& a, const auto& b) {
      return a.content.size() > b.content.size();
    });
    for (const auto& token : added) starts_added[byte_at(token.content, 0)] = true;
  }

  // The added token that the text has at this place.
  const AddedToken* added_at(std::string_view text, size_t at) const {
    if (!starts_added[byte_at(text, at)]) return nullptr;
    for (const auto& token : added) {
      if (text.substr(at).starts_with(token.content)) return &token;
    }
    return nullptr;
  }

 private:
  void number_tokens() {
    for (const auto& token : added) {
      const auto [at, inserted] = ids.emplace(token.content, token.id);
      TORCH_CHECK_VALUE(at->second == token.id, file, ": token ", quoted(token.content),
                        " must have one id, got ", at->second, " and ", token.id);
    }
    spelling.resize(ids.size());
    bytes.resize(ids.size());
    std::vector<bool> taken(ids.size());
    for (const auto& [token, id] : ids) {
      TORCH_CHECK_VALUE(id < ids.size(), file, " must number its ", ids.size(),
                        " tokens from 0 without holes, got id ", id, " for ", quoted(token));
      TORCH_CHECK_VALUE(!taken[id], file, " must give each token its own id, got ", id, " for ",
                        quoted(spelling[id]), " and ", quoted(token));
      taken[id] = true;
      spelling[id] = token;
      bytes[id] = bytes_of(token);
    }
    for (const auto& token : added) bytes[token.id] = token.content;
  }

  uint32_t id_in(const std::string& token, const std::string& where) const {
    const auto found = ids.find(token);
    TORCH_CHECK_VALUE(found != ids.end(), where, " must merge tokens of ", file, ", got ",
                      quoted(token), ", which is not there");
    return found->second;
  }

  void add_merge(const NamedMerge& merge, uint32_t rank) {
    const auto pair = pair_of(id_in(merge.left, merge.where), id_in(merge.right, merge.where));
    const auto id = id_in(merge.left + merge.right, merge.where);
    TORCH_CHECK_VALUE(merges.insert({pair, rank, id}), merge.where,
                      " must not repeat a merge, got ", quoted(merge.left), " and ",
                      quoted(merge.right), " again");
  }
};

ByteLevelBPE ByteLevelBPE::from_files(const fs::path& vocab, const fs::path& merges) {
  auto tables = std::make_shared<Tables>();
  tables->file = vocab.string();
  read_vocabulary(read_json(vocab), tables->file, tables->ids);
  const auto end = tables->ids.find(kEndOfText);
  if (end != tables->ids.end()) tables->added.push_back({end->first, end->second});
  tables->finish(read_merges_txt(merges));
  return ByteLevelBPE(std::move(tables));
}

ByteLevelBPE ByteLevelBPE::from_tokenizer_json(const fs::path& path) {
  const auto json = read_json(path);
  auto tables = std::make_shared<Tables>();
  const auto& file = tables->file = path.string();
  check_pipeline(json, file);
  const auto& prefix = member(member(json, "pre_tokenizer"), "add_prefix_space");
  TORCH_CHECK_VALUE(prefix.is_null() || prefix.is_boolean(), file,
                    ": pre_tokenizer.add_prefix_space must be a boolean, got ", shown(prefix));
  tables->add_prefix_space = prefix.is_null() || prefix.get<bool>();  // true in `tokenizers` too
  const auto& model = member(json, "model");
  read_vocabulary(member(model, "vocab"), file + ": model.vocab", tables->ids);
  tables->added = read_added_tokens(member(json, "added_tokens"), file);
  tables->finish(read_merges_json(member(model, "merges"), file));
  return ByteLevelBPE(std::move(tables));
}

ByteLevelBPE ByteLevelBPE::from_folder(const fs::path& folder) {
  std::error_code error;
  if (fs::exists(folder / "tokenizer.json", error)) {
    return from_tokenizer_json(folder / "tokenizer.json");
  }
  TORCH_CHECK_VALUE(fs::exists(folder / "vocab.json", error), folder.string(),
                    " must hold tokenizer.json, or vocab.json and merges.txt, got neither");
  return from_files(folder / "vocab.json", folder / "merges.txt");
}

ByteLevelBPE ByteLevelBPE::bytes() {
  auto tables = std::make_shared<Tables>();
  tables->file = "the bytes' vocabulary";
  for (uint32_t b = 0; b < 256; ++b) tables->ids.emplace(alphabet().spelling[b], b);
  tables->finish({});
  return ByteLevelBPE(std::move(tables));
}

void ByteLevelBPE::save(const fs::path& folder) const {
  TORCH_CHECK_VALUE(!tables_->add_prefix_space, folder.string(),
                    ": vocab.json and merges.txt have no place for add_prefix_space, got true");
  Json vocabulary = Json::object();
  for (const auto& [token, id] : tables_->ids) vocabulary[token] = id;
  for (const auto& token : tables_->added) {
    TORCH_CHECK_VALUE(token.content == kEndOfText, folder.string(),
                      ": vocab.json has a place for no added token but ", kEndOfText, ", got ",
                      quoted(token.content));
  }
  std::vector<Merge> merges;
  for (const auto& merge : tables_->merges.slots()) {
    if (!MergeTable::is_empty(merge)) merges.push_back(merge);
  }
  std::sort(merges.begin(), merges.end(),
            [](const Merge& a, const Merge& b) { return a.rank < b.rank; });
  std::string lines = "#version: 0.2\n";
  for (const auto& merge : merges) {
    lines += tables_->spelling[merge.pair >> 32] + " " +
             tables_->spelling[merge.pair & 0xFFFFFFFFU] + "\n";
  }
  weights::write_file(folder / "vocab.json", vocabulary.dump());
  weights::write_file(folder / "merges.txt", lines);
}

std::vector<int64_t> ByteLevelBPE::encode(std::string_view text) const {
  std::vector<int64_t> ids;
  Merger merger(tables_->merges);
  // A word met before is copied from the ids that it got then: (first, count).
  std::unordered_map<std::string_view, std::pair<size_t, size_t>> seen;
  const auto encode_word = [&](std::string_view word) {
    const auto [known, is_new] = seen.try_emplace(word, ids.size(), 0);
    auto& [first, count] = known->second;
    if (is_new) {
      merger.append(word, tables_->byte_ids, ids);
      count = ids.size() - first;
    } else {
      for (size_t i = 0; i < count; ++i) ids.push_back(ids[first + i]);
    }
  };

  std::string with_space;
  const auto encode_part = [&](std::string_view part) {
    if (!tables_->add_prefix_space || part.empty() || part.starts_with(' ')) {
      split_bytes(part, encode_word);
      return;
    }
    with_space.assign(" ").append(part);
    split_bytes(with_space, encode_word);
    seen.clear();  // its keys point into with_space
  };

  size_t start = 0;
  for (size_t at = 0; at < text.size() && !tables_->added.empty();) {
    const auto* token = tables_->added_at(text, at);
    if (token == nullptr) {
      ++at;
      continue;
    }
    encode_part(text.substr(start, at - start));
    ids.push_back(token->id);
    start = at += token->content.size();
  }
  encode_part(text.substr(start));
  return ids;
}

std::string ByteLevelBPE::decode(std::span<const int64_t> ids) const {
  std::string text;
  for (const auto id : ids) {
    if (id >= 0 && id < vocab_size()) text += tables_->bytes[static_cast<size_t>(id)];
  }
  return text;
}

int64_t ByteLevelBPE::vocab_size() const {
  return static_cast<int64_t>(tables_->bytes.size());
}

std::optional<int64_t> ByteLevelBPE::token_to_id(std::string_view token) const {
  const auto found = tables_->ids.find(std::string(token));
  if (found == tables_->ids.end()) return std::nullopt;
  return found->second;
}

std::optional<std::string> ByteLevelBPE::id_to_token(int64_t id) const {
  if (id < 0 || id >= vocab_size()) return std::nullopt;
  return tables_->spelling[static_cast<size_t>(id)];
}

std::string StreamingDecoder::push(int64_t id) {
  pending_ += tokenizer_.decode({&id, 1});
  const size_t whole = pending_.size() - unfinished_tail(pending_);
  auto text = pending_.substr(0, whole);
  pending_.erase(0, whole);
  return text;
}

std::string StreamingDecoder::finish() {
  return std::exchange(pending_, "");
}

}  // namespace attn
