#pragma once

#include <attn/export.h>
#include <attn/functional.h>

#include <string>
#include <vector>

namespace attn {

struct HeatmapOptions {
  std::string title = {};
  std::vector<std::string> query_labels = {};  ///< one per row (T), or none
  std::vector<std::string> key_labels = {};    ///< one per column (S), or none
};

/// Attention weights as text, one shaded cell per weight: [T, S], or [H, T, S] with the heads below
/// one another. Each map is shaded relative to its own largest weight.
/// @throws c10::ValueError if weights is not a 2-D or 3-D floating tensor, or labels do not fit.
ATTN_API std::string text_heatmap(const Tensor& weights, const HeatmapOptions& options = {});

/// The same as a stand-alone SVG document, heads side by side, each cell with its value as a
/// tooltip.
/// @throws c10::ValueError as `text_heatmap`.
ATTN_API std::string svg_heatmap(const Tensor& weights, const HeatmapOptions& options = {});

}  // namespace attn
