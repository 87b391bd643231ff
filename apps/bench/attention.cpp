#include "attention_check.h"
#include "attention_problem.h"
#include "commands.h"
#include "session.h"

#include <attn/functional.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/InferenceMode.h>

#include <array>
#include <memory>

namespace bench {
namespace {

constexpr std::array kShapes = {
    AttentionShape{1, 4, 1, 64},    AttentionShape{16, 8, 4, 64},    AttentionShape{2, 5, 4, 4},
    AttentionShape{16, 12, 4, 8},   AttentionShape{1, 64, 12, 64},   AttentionShape{4, 64, 12, 64},
    AttentionShape{8, 64, 8, 16},   AttentionShape{1, 128, 12, 64},  AttentionShape{1, 256, 12, 64},
    AttentionShape{8, 256, 6, 64},  AttentionShape{1, 512, 12, 64},  AttentionShape{4, 512, 16, 32},
    AttentionShape{1, 512, 6, 128}, AttentionShape{1, 1024, 12, 64}, AttentionShape{1, 1024, 1, 64},
    AttentionShape{1, 2048, 4, 80},
};

// Masks other than the causal one are measured where they are used: on sentences.
bool fits(const AttentionShape& shape, const AttentionMode& mode) {
  return mode.causal || (shape.T >= 64 && shape.T <= 512);
}

// Above, the chain's [T, T] weights are so slow that it says nothing.
constexpr int64_t kLongestChain = 512;

using Problem = std::shared_ptr<const AttentionProblem>;

AttentionSide ours(const Problem& problem, attn::Implementation implementation, const char* name) {
  const auto options = attn::functional::AttentionOptions()
                           .causal(problem->mode.causal)
                           .dropout_p(problem->mode.dropout_p)
                           .key_padding_mask(problem->padding)
                           .implementation(implementation);
  return {name, [options, H = problem->shape.H](const AttentionInput& input) {
            return attn::functional::packed_self_attention(input.qkv, H, options);  // [B, T, C]
          }};
}

// At its best: strided views of the same projection, no copy of its result, an additive mask. Views
// are made beforehand where the graph lets them.
AttentionSide sdpa(const Problem& problem) {
  const auto mask =
      problem->bias.defined() ? std::optional(problem->bias) : std::optional<at::Tensor>();
  const auto& mode = problem->mode;
  return {"SDPA",
          [mask, shape = problem->shape, mode](const AttentionInput& input) {
            const auto [q, k, v] = mode.backward ? heads_of(input.qkv, shape) : input.heads;
            return at::scaled_dot_product_attention(q, k, v, mask, mode.dropout_p,
                                                    mode.causal);  // [B, H, T, D]
          },
          /*by_heads=*/true};
}

enum class Part { all, forward };

Contender contender(const AttentionSide& side, const Problem& problem, Part part = Part::all) {
  const auto& mode = problem->mode;
  const bool backward = mode.backward && part == Part::all;
  const auto repeat = [side, problem, backward, inference = !mode.backward,
                       next = size_t{0}](int64_t iterations) mutable {
    const c10::InferenceMode guard(inference);
    for (int64_t i = 0; i < iterations; ++i) {
      const auto& input = problem->inputs[next];
      next = (next + 1) % problem->inputs.size();
      if (backward) {
        gradient(side, input);
      } else {
        side.forward(input);
      }
    }
  };
  return {side.name, repeat};
}

Entry entry(const AttentionShape& shape, const AttentionMode& mode) {
  at::manual_seed(0);
  const auto problem = std::make_shared<const AttentionProblem>(make_problem(shape, mode));
  const auto us = ours(problem, attn::Implementation::automatic, "ours");
  const auto peer = sdpa(problem);
  const auto chain = ours(problem, attn::Implementation::math, "op chain");
  check_side(us, *problem);
  check_side(peer, *problem);

  Entry entry{shape.name(), contender(us, problem), {contender(peer, problem), std::nullopt}, {}};
  if (shape.T <= kLongestChain) {
    check_side(chain, *problem);
    entry.peers[1] = contender(chain, problem);
  }
  if (mode.bfloat16) return entry;  // the probes know no floor of it
  const auto forward = problem->forward_work();
  if (!mode.backward) {
    entry.floors = {Floor{.work = forward}};
    return entry;
  }
  const auto backward = problem->backward_work();
  auto only_forward = contender(us, problem, Part::forward);
  only_forward.name = "our forward";
  entry.floors = {
      Floor{.work = {forward.flops + backward.flops, forward.exponentials + backward.exponentials}},
      Floor{.work = backward, .beside = only_forward}};
  return entry;
}

void bench_mode(Session& session, const AttentionMode& mode) {
  Table table{.name = std::string(mode.name),
              .title = std::string(mode.title),
              .legend = "B,T,H,D",
              .peers = {"SDPA", "op chain"},
              .floors = {}};
  if (!mode.bfloat16) table.floors.emplace_back("floor");
  if (!mode.bfloat16 && mode.backward) table.floors.emplace_back("backward");
  session.begin(table);
  for (const auto& shape : kShapes) {
    if (fits(shape, mode) && session.wants(shape.name())) session.add(entry(shape, mode));
  }
  session.end();
}

}  // namespace

void bench_attention(Session& session) {
  for (const auto& mode : kAttentionModes) {
    const auto& wanted = session.options().mode;
    if (wanted == "all" || wanted == mode.name) bench_mode(session, mode);
  }
}

}  // namespace bench
