#include "byte_corpus.h"

#include <array>
#include <cmath>
#include <functional>

namespace demo {
namespace {

constexpr size_t kValues = 256;

// How often each byte, and each byte after each other byte, occurs in some spans of a text.
class Counts {
 public:
  Counts(const std::string& bytes, const std::vector<Span>& spans) : pairs_(kValues * kValues) {
    for (const auto& span : spans) {
      for (size_t i = span.first; i < span.last; ++i) {
        ++bytes_[index(bytes[i])];
        ++total_;
        if (i == span.first) continue;
        const auto before = index(bytes[i - 1]);
        followers_[before] += pairs_[before * kValues + index(bytes[i])] == 0.0 ? 1.0 : 0.0;
        ++pairs_[before * kValues + index(bytes[i])];
        ++befores_[before];
      }
    }
  }

  // Add-one smoothing (Laplace).
  double unigram(char byte) const {
    return (bytes_[index(byte)] + 1.0) / (total_ + static_cast<double>(kValues));
  }

  // Witten-Bell: as many pseudo-counts as there are different followers, spread as the unigram is.
  double bigram(char before, char byte) const {
    const auto row = index(before);
    const double pseudo = followers_[row] > 0.0 ? followers_[row] : 1.0;
    return (pairs_[row * kValues + index(byte)] + pseudo * unigram(byte)) /
           (befores_[row] + pseudo);
  }

  double unigram_entropy() const {
    double sum = 0.0;
    for (const double n : bytes_) {
      if (n > 0.0) sum -= n * std::log(n / total_);
    }
    return sum / total_;
  }

  double bigram_entropy() const {
    double sum = 0.0;
    double total = 0.0;
    for (size_t i = 0; i < pairs_.size(); ++i) {
      if (pairs_[i] > 0.0) sum -= pairs_[i] * std::log(pairs_[i] / befores_[i / kValues]);
      total += pairs_[i];
    }
    return total > 0.0 ? sum / total : 0.0;
  }

 private:
  static size_t index(char byte) { return static_cast<unsigned char>(byte); }

  std::array<double, kValues> bytes_{};
  std::array<double, kValues> befores_{};    // as the first of a pair
  std::array<double, kValues> followers_{};  // different bytes seen after it
  std::vector<double> pairs_;                // [before, byte]
  double total_ = 0.0;
};

// Mean of -ln p(byte i | bytes before i) over the spans.
double cross_entropy(const std::vector<Span>& spans,
                     const std::function<double(size_t)>& probability) {
  double sum = 0.0;
  double count = 0.0;
  for (const auto& span : spans) {
    for (size_t i = span.first; i < span.last; ++i) {
      sum -= std::log(probability(i));
      ++count;
    }
  }
  return sum / count;
}

}  // namespace

ByteCorpus::ByteCorpus(std::string_view bytes) : bytes_(bytes) {
  const auto cut = [n = bytes.size()](size_t part) { return part * n / 100; };
  for (size_t tenth = 0; tenth < 10; ++tenth) {
    training_.push_back({cut(10 * tenth), cut(10 * tenth + 9)});
    held_out_.push_back({cut(10 * tenth + 9), cut(10 * tenth + 10)});
  }
}

size_t ByteCorpus::held_out_size() const {
  size_t size = 0;
  for (const auto& span : held_out_) size += span.last - span.first;
  return size;
}

NatsPerByte ByteCorpus::unigram() const {
  const Counts counts(bytes_, training_);
  const auto probability = [&](size_t i) { return counts.unigram(bytes_[i]); };
  return {cross_entropy(training_, probability), cross_entropy(held_out_, probability)};
}

NatsPerByte ByteCorpus::bigram() const {
  const Counts counts(bytes_, training_);
  const auto probability = [&](size_t i) {
    return i == 0 ? counts.unigram(bytes_[i]) : counts.bigram(bytes_[i - 1], bytes_[i]);
  };
  return {cross_entropy(training_, probability), cross_entropy(held_out_, probability)};
}

double ByteCorpus::unigram_entropy() const {
  return Counts(bytes_, {{0, bytes_.size()}}).unigram_entropy();
}

double ByteCorpus::bigram_entropy() const {
  return Counts(bytes_, {{0, bytes_.size()}}).bigram_entropy();
}

}  // namespace demo
