#include "attn/heatmap.h"

#include "support/expect_error.h"
#include "support/mentions.h"

#include <ATen/Functions.h>
#include <torch/types.h>

#include <gtest/gtest.h>

#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace attn::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

torch::Tensor triangle() {
  return torch::tensor({{1.0, 0.0, 0.0}, {0.25, 0.75, 0.0}, {0.5, 0.125, 0.375}});
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

/// A small XML reader: tags nest and close, attributes are quoted, no stray < or &.
::testing::AssertionResult well_formed(const std::string& xml) {
  const auto failure = [](const std::string& what, const std::string& where) {
    return ::testing::AssertionFailure() << what << " near \"" << where.substr(0, 60) << "\"";
  };
  std::vector<std::string> open;
  bool had_root = false;
  for (size_t at = 0; at < xml.size();) {
    if (xml[at] == '&') {
      const auto entity = xml.substr(at, xml.find(';', at) - at + 1);
      if (entity != "&amp;" && entity != "&lt;" && entity != "&gt;" && entity != "&quot;") {
        return failure("a stray &", xml.substr(at));
      }
    }
    if (xml[at] != '<') {
      if (open.empty() && !std::isspace(static_cast<unsigned char>(xml[at]))) {
        return failure("text outside the root", xml.substr(at));
      }
      ++at;
      continue;
    }
    const auto end = xml.find('>', at);
    if (end == std::string::npos) return failure("an unclosed tag", xml.substr(at));
    auto tag = xml.substr(at + 1, end - at - 1);
    if (tag.find('<') != std::string::npos || count(tag, "\"") % 2 != 0) {
      return failure("a broken tag", tag);
    }
    at = end + 1;
    if (tag.front() == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return failure("a wrong closing tag", tag);
      open.pop_back();
    } else if (tag.back() != '/') {
      if (open.empty() && had_root) return failure("a second root", tag);
      had_root = true;
      open.push_back(tag.substr(0, tag.find(' ')));
    }
  }
  if (!open.empty()) return failure("an element left open", open.back());
  return had_root ? ::testing::AssertionSuccess() : failure("no root", xml);
}

TEST(TextHeatmap, ShadesEachWeightByItsShareOfTheLargest) {
  EXPECT_EQ(text_heatmap(triangle()),
            " |██    |\n"
            " |░░▓▓  |\n"
            " |▒▒░░▒▒|\n");
}

TEST(TextHeatmap, HasARowPerQueryBelowTitleAndHead) {
  const auto weights = torch::rand({2, 4, 6});
  const auto lines = lines_of(text_heatmap(weights, {.title = "layer 0"}));
  ASSERT_EQ(lines.size(), 1u + 2 * (1 + 4));
  EXPECT_EQ(lines[0], "layer 0");
  EXPECT_TRUE(mentions(lines[1], {"head 0"}));
  EXPECT_TRUE(mentions(lines[6], {"head 1"}));
}

TEST(TextHeatmap, PutsTheQuerysLabelBeforeItsRow) {
  const auto lines = lines_of(text_heatmap(triangle(), {.query_labels = {"the", "c", "sat"}}));
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0], "the |██    |");
  EXPECT_EQ(lines[1], "  c |░░▓▓  |");
}

TEST(TextHeatmap, ShowsWeightsHoweverSmallAndNothingForZero) {
  EXPECT_EQ(text_heatmap(torch::tensor({{1.0, 1e-9, 0.0}})), " |██░░  |\n");
  EXPECT_EQ(text_heatmap(torch::zeros({1, 2})), " |    |\n");
}

TEST(TextHeatmap, MarksNaNAndSurvivesInfinity) {
  EXPECT_EQ(text_heatmap(torch::tensor({{kNaN, 1.0f}})), " |??██|\n");
  EXPECT_EQ(text_heatmap(torch::full({1, 2}, kNaN)), " |????|\n");
  EXPECT_EQ(text_heatmap(torch::tensor({{kInfinity, 1.0f, -kInfinity}})), " |████  |\n");
  EXPECT_EQ(text_heatmap(torch::tensor({{kInfinity, 0.0f}})).find("nan"), std::string::npos);
}

TEST(SvgHeatmap, IsWellFormedWithACellAndItsValuePerWeight) {
  const auto svg = svg_heatmap(triangle(), {.title = "weights"});
  EXPECT_TRUE(well_formed(svg)) << svg;
  EXPECT_TRUE(mentions(svg, {"<svg xmlns=\"http://www.w3.org/2000/svg\"", ">weights<"}));
  EXPECT_EQ(count(svg, "<title>query "), 9u);
  EXPECT_TRUE(mentions(
      svg, {"<title>query 0, key 0: 1.000000</title>", "<title>query 1, key 1: 0.750000</title>",
            "<title>query 2, key 1: 0.125000</title>"}));
}

TEST(SvgHeatmap, DrawsZeroWhiteAndTheLargestDarkest) {
  const auto svg = svg_heatmap(torch::tensor({{0.0, 0.5}}));
  const auto cells = lines_of(svg.substr(svg.find("<g ")));
  ASSERT_GE(cells.size(), 3u);
  EXPECT_TRUE(mentions(cells[1], {"fill=\"#ffffff\"", ": 0.000000"}));
  EXPECT_TRUE(mentions(cells[2], {"fill=\"#08306b\"", ": 0.500000"}));
}

TEST(SvgHeatmap, EscapesWhatTheUserWrote) {
  const std::string nasty = "<&\">'\x01\n";
  const auto svg = svg_heatmap(triangle(), {.title = "a < b && \"c\"",
                                            .query_labels = {nasty, "</svg>", "&amp;"},
                                            .key_labels = {"<!--", "]]>", "é"}});
  EXPECT_TRUE(well_formed(svg)) << svg;
  EXPECT_TRUE(mentions(svg, {"a &lt; b &amp;&amp; &quot;c&quot;", "&lt;&amp;&quot;&gt;'",
                             "&lt;/svg&gt;", "&amp;amp;", "&lt;!--", "]]&gt;", "é"}));
  EXPECT_EQ(svg.find('\x01'), std::string::npos);
}

TEST(SvgHeatmap, PutsHeadsSideBySide) {
  const auto svg = svg_heatmap(torch::rand({3, 2, 4}));
  EXPECT_TRUE(well_formed(svg)) << svg;
  EXPECT_TRUE(mentions(svg, {">head 0<", ">head 1<", ">head 2<"}));
  EXPECT_EQ(count(svg, "<title>query "), 24u);
  EXPECT_EQ(count(svg, "translate("), 3u);
}

TEST(SvgHeatmap, DrawsNaNAndInfinityAsGivenInColoursThatExist) {
  const auto svg = svg_heatmap(torch::tensor({{kNaN, kInfinity}, {-kInfinity, 1.0f}}));
  EXPECT_TRUE(well_formed(svg)) << svg;
  EXPECT_TRUE(mentions(svg, {"key 0: nan", "key 1: inf", "key 0: -inf", "#999999"}));
  EXPECT_EQ(svg.find("fill=\"nan"), std::string::npos);
  EXPECT_TRUE(well_formed(svg_heatmap(torch::full({2, 2}, kNaN))));
}

TEST(Heatmap, TakesAnyFloatingDtypeStridesAndGradients) {
  const auto expected = text_heatmap(triangle());
  for (const auto dtype : {torch::kFloat64, torch::kBFloat16, torch::kHalf}) {
    EXPECT_EQ(text_heatmap(triangle().to(dtype)), expected) << dtype;
  }
  EXPECT_EQ(text_heatmap(triangle().t().contiguous().t()), expected);
  EXPECT_EQ(text_heatmap(triangle().requires_grad_()), expected);
}

TEST(Heatmap, OfNothingIsEmptyButWhole) {
  EXPECT_EQ(text_heatmap(torch::zeros({0, 3})), "");
  EXPECT_EQ(text_heatmap(torch::zeros({2, 0})), " ||\n ||\n");
  for (const auto& empty : {torch::zeros({0, 3}), torch::zeros({2, 0}), torch::zeros({0, 2, 2})}) {
    EXPECT_TRUE(well_formed(svg_heatmap(empty))) << empty.sizes();
  }
}

TEST(Heatmap, RejectsWhatIsNoMapOfWeights) {
  const auto rejects = [](const torch::Tensor& weights, const HeatmapOptions& options,
                          std::initializer_list<std::string> parts) {
    EXPECT_TRUE(mentions(value_error([&] { text_heatmap(weights, options); }), parts));
    EXPECT_TRUE(mentions(value_error([&] { svg_heatmap(weights, options); }), parts));
  };
  rejects(torch::ones({2}), {}, {"[T, S]", "[H, T, S]", "[2]"});
  rejects(torch::ones({1, 2, 3, 3}), {}, {"[H, T, S]", "[1, 2, 3, 3]"});
  rejects(torch::ones({3, 3}, torch::kLong), {}, {"floating-point", "Long"});
  rejects(torch::Tensor(), {}, {"floating-point", "undefined"});
  rejects(triangle(), {.query_labels = {"a", "b"}}, {"query_labels", "(3)", "got 2"});
  rejects(triangle(), {.key_labels = {"a", "b", "c", "d"}}, {"key_labels", "(3)", "got 4"});
}

}  // namespace
}  // namespace attn::testing
