#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace demo {

/// Bytes first .. last - 1 of a text.
struct Span {
  size_t first;
  size_t last;
};

/// Mean cross entropy of a model in nats per byte: on what it was fitted to, and on what it has not
/// seen.
struct NatsPerByte {
  double training;
  double held_out;
};

/// A text cut into 100 equal parts, of which every tenth is held out: the 10th, the 20th, ..., the
/// last. So a text that changes on its way is represented on both sides.
class ByteCorpus {
 public:
  explicit ByteCorpus(std::string_view bytes);

  const std::string& bytes() const { return bytes_; }
  const std::vector<Span>& training() const { return training_; }
  const std::vector<Span>& held_out() const { return held_out_; }
  size_t held_out_size() const;

  /// Byte frequencies of the training parts, add-one smoothed, as a predictor.
  NatsPerByte unigram() const;
  /// Frequencies given the byte before, smoothed towards the unigram's (Witten and Bell 1991).
  NatsPerByte bigram() const;

  /// Plain entropy of the whole text's byte frequencies: no smoothing, nothing held out.
  double unigram_entropy() const;
  /// The same, given the byte before.
  double bigram_entropy() const;

 private:
  std::string bytes_;
  std::vector<Span> training_;
  std::vector<Span> held_out_;
};

}  // namespace demo
