// attn_bench from outside: it runs, checks what it times, and writes what it measured. No time is
// looked at.

#include "process.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

using Strings = std::vector<std::string>;

process::Result bench(const Strings& arguments) {
  return process::run(ATTN_BENCH, arguments);
}

// Runs with --quick and --json; gives the file's content.
nlohmann::json measure(Strings arguments) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("attn_bench_test." + std::to_string(getpid()) + ".json");
  arguments.insert(arguments.end(), {"--quick", "--threads", "1", "--json", path.string()});
  const auto result = bench(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  std::ifstream file(path);
  auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  std::filesystem::remove(path);
  return json;
}

TEST(Bench, EveryModeOfAttentionRunsAndIsChecked) {
  for (const char* mode : {"forward", "backward", "dropout", "bf16", "bf16-backward"}) {
    const auto json = measure({"attention", "--mode", mode, "--filter", "1,4,1,64"});
    ASSERT_TRUE(json.is_object()) << mode;
    const auto& row = json["tables"].at(0)["rows"].at(0);
    EXPECT_EQ(row["name"], "1,4,1,64");
    EXPECT_GT(row["peers"]["SDPA"]["median"], 0.0);
  }
  for (const char* mode : {"bidirectional", "padding"}) {
    const auto json = measure({"attention", "--mode", mode, "--filter", "1,64,12,64"});
    ASSERT_TRUE(json.is_object()) << mode;
    EXPECT_EQ(json["tables"].at(0)["rows"].size(), 1U);
  }
}

TEST(Bench, ModulesAndTheLanguageModelRun) {
  const auto modules = measure({"module", "--filter", "2,5,16,4"});
  ASSERT_TRUE(modules.is_object());
  EXPECT_EQ(modules["tables"].size(), 2U);
  const auto model = measure({"lm"});
  ASSERT_TRUE(model.is_object());
  EXPECT_EQ(model["tables"].at(0)["rows"].size(), 2U);
}

TEST(Bench, BadUsageIsExitCode2) {
  EXPECT_EQ(bench({}).exit_code, 2);
  EXPECT_EQ(bench({"attention", "--mode", "sideways"}).exit_code, 2);
  EXPECT_EQ(bench({"attention", "--threads", "0"}).exit_code, 2);
  const auto result = bench({"attention", "--quick", "--filter", "no such row"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("no such row"), std::string::npos) << result.err;
}

}  // namespace
