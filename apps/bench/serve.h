#pragma once

#include "contest.h"

#include <functional>
#include <string>
#include <vector>

namespace bench {

/// Something that another process can have timed here.
struct Served {
  Contender contender;
  /// Numbers that tell whether both processes compute the same from the same seed; may be empty.
  std::function<std::vector<double>()> fingerprint;
};

/// Our side of a contest between two processes, see peers.py. Begins with a line of JSON about the
/// machine, then answers lines of standard input until they end:
///
///   time module 1,4,8,2 100       seconds for one of 100 iterations
///   fill module 1,4,8,2 0.01      iterations that fill so many seconds
///   check module 1,4,8,2          numbers that the seed determines
///
/// What can be asked for: `module B,T,C,H` (SelfAttention), `multi_head B,T,C,H`
/// (MultiHeadSelfAttention), `lm training`, `lm inference`, `generate DTYPE,PART,N,FOLDER`. An
/// answer that begins with "error" says what was wrong with the line.
int serve();

/// `kind` is module or multi_head, `shape` "B,T,C,H".
Served serve_module(const std::string& kind, const std::string& shape);
/// `part` is training or inference.
Served serve_lm(const std::string& part);
/// `which` is "float32" or "bfloat16", then "decode,N" (N tokens behind a prompt of 16),
/// "prefill,N" (one token behind N) or "step,N" (one with N in the cache), then GPT-2's folder.
Served serve_generate(const std::string& which);

}  // namespace bench
