#include "attn/heatmap.h"

#include <c10/util/Exception.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace attn {
namespace {

// One head's weights on the CPU, and what to call it.
struct Map {
  std::string name;
  Tensor weights;  // [T, S] float64
  double greatest = 0.0;

  double at(int64_t t, int64_t s) const {
    return weights.const_data_ptr<double>()[t * weights.size(1) + s];
  }
  // Share of the greatest weight, in [0, 1]; NaN stays.
  double shade(int64_t t, int64_t s) const {
    return greatest > 0.0 ? std::clamp(at(t, s) / greatest, 0.0, 1.0) : at(t, s) * 0.0;
  }
};

std::vector<Map> split_maps(const Tensor& weights, const HeatmapOptions& options) {
  TORCH_CHECK_VALUE(weights.defined() && weights.is_floating_point() &&
                        (weights.dim() == 2 || weights.dim() == 3),
                    "weights must be a floating-point [T, S] or [H, T, S] tensor, got ",
                    weights.defined() ? weights.toString() : "an undefined one", " of shape ",
                    weights.defined() ? weights.sizes() : at::IntArrayRef());
  const int64_t T = weights.size(-2);
  const int64_t S = weights.size(-1);
  const auto check_labels = [](const char* name, const std::vector<std::string>& labels,
                               int64_t count) {
    TORCH_CHECK_VALUE(labels.empty() || static_cast<int64_t>(labels.size()) == count, name,
                      " must have one label per weight (", count, "), got ", labels.size());
  };
  check_labels("query_labels", options.query_labels, T);
  check_labels("key_labels", options.key_labels, S);

  std::vector<Map> maps;
  const auto heads = weights.dim() == 2 ? weights.unsqueeze(0) : weights;  // [H, T, S]
  for (int64_t h = 0; h < heads.size(0); ++h) {
    Map map;
    if (weights.dim() == 3) map.name = fmt::format("head {}", h);
    map.weights = heads[h].detach().to(at::kCPU, at::kDouble).contiguous();
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t s = 0; s < S; ++s) {
        const double w = map.at(t, s);
        if (std::isfinite(w)) map.greatest = std::max(map.greatest, w);
      }
    }
    maps.push_back(std::move(map));
  }
  return maps;
}

std::string escape_xml(const std::string& raw) {
  std::string out;
  for (const char c : raw) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        // XML 1.0 has no way to write the other control characters.
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

// From white through blue to dark blue; grey for NaN.
std::string colour(double shade) {
  if (std::isnan(shade)) return "#999999";
  constexpr std::array<double, 3> kLight = {255, 255, 255};
  constexpr std::array<double, 3> kDark = {8, 48, 107};
  std::array<int, 3> rgb{};
  for (size_t i = 0; i < 3; ++i) {
    rgb[i] = static_cast<int>(std::lround(kLight[i] + shade * (kDark[i] - kLight[i])));
  }
  return fmt::format("#{:02x}{:02x}{:02x}", rgb[0], rgb[1], rgb[2]);
}

}  // namespace

std::string text_heatmap(const Tensor& weights, const HeatmapOptions& options) {
  constexpr std::array<const char*, 5> kShades = {"  ", "░░", "▒▒", "▓▓", "██"};
  size_t label_width = 0;
  for (const auto& label : options.query_labels) label_width = std::max(label_width, label.size());

  std::string out;
  if (!options.title.empty()) out += options.title + '\n';
  for (const auto& map : split_maps(weights, options)) {
    if (!map.name.empty()) out += fmt::format("{} (darkest = {:.3f})\n", map.name, map.greatest);
    for (int64_t t = 0; t < map.weights.size(0); ++t) {
      const auto label = options.query_labels.empty() ? "" : options.query_labels[t];
      out += fmt::format("{:>{}} |", label, label_width);
      for (int64_t s = 0; s < map.weights.size(1); ++s) {
        const double shade = map.shade(t, s);
        // Any weight above 0 is visible: "nothing" means exactly 0.
        out += std::isnan(shade) ? "??" : kShades[static_cast<size_t>(std::ceil(shade * 4.0))];
      }
      out += "|\n";
    }
  }
  return out;
}

std::string svg_heatmap(const Tensor& weights, const HeatmapOptions& options) {
  constexpr int64_t kCell = 18;    // pixels
  constexpr int64_t kMargin = 60;  // for labels
  constexpr int64_t kGap = 24;     // between heads
  const auto maps = split_maps(weights, options);
  const int64_t T = weights.size(-2);
  const int64_t S = weights.size(-1);
  const int64_t map_width = S * kCell;
  const int64_t heads = static_cast<int64_t>(maps.size());
  const int64_t width = 2 * kMargin + heads * map_width + std::max<int64_t>(heads - 1, 0) * kGap;
  const int64_t height = 2 * kMargin + T * kCell;

  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" "
      "viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" font-size=\"11\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      width, height);
  if (!options.title.empty()) {
    out += fmt::format("<text x=\"{}\" y=\"20\" font-size=\"14\">{}</text>\n", kMargin,
                       escape_xml(options.title));
  }
  for (int64_t t = 0; t < static_cast<int64_t>(options.query_labels.size()); ++t) {
    out += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", kMargin - 6,
                       kMargin + t * kCell + 13, escape_xml(options.query_labels[t]));
  }
  int64_t left = kMargin;
  for (const auto& map : maps) {
    out += fmt::format("<g transform=\"translate({},{})\">\n", left, kMargin);
    if (!map.name.empty()) {
      out += fmt::format("<text x=\"0\" y=\"-22\">{}</text>\n", map.name);
    }
    for (int64_t s = 0; s < static_cast<int64_t>(options.key_labels.size()); ++s) {
      out += fmt::format("<text x=\"{}\" y=\"-6\" text-anchor=\"middle\">{}</text>\n",
                         s * kCell + kCell / 2, escape_xml(options.key_labels[s]));
    }
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t s = 0; s < S; ++s) {
        out += fmt::format(
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\" stroke=\"#dddddd\">"
            "<title>query {}, key {}: {:.6f}</title></rect>\n",
            s * kCell, t * kCell, kCell, kCell, colour(map.shade(t, s)), t, s, map.at(t, s));
      }
    }
    out += "</g>\n";
    left += map_width + kGap;
  }
  out += "</svg>\n";
  return out;
}

}  // namespace attn
