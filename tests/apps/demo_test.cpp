// attn_demo from outside: what it prints, what it writes, and how it fails.

#include "process.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

namespace {

namespace fs = std::filesystem;
using process::Out;
using process::Result;
using Strings = std::vector<std::string>;

Result demo(const Strings& arguments, const Strings& environment = {}, Out out = Out::pipe) {
  return process::run(ATTN_DEMO, arguments, environment, out);
}

// A folder that is gone after the test.
class Folder {
 public:
  Folder() {
    auto name = (fs::temp_directory_path() / "attn_demo_test.XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return (path_ / name).string();
  }
  size_t entries() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(path_), {}));
  }

 private:
  fs::path path_;
};

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Sentences, the same on every machine.
std::string english(size_t size) {
  const Strings subjects = {"The reader", "A student", "My neighbour", "The old captain", "Nobody"};
  const Strings verbs = {"opens", "remembers", "has written", "sells", "looks for"};
  const Strings objects = {"the letter", "a small house", "three books", "the way home", "it"};
  const Strings ends = {" in the morning.", " without a word.", ", but not today.", ".\n"};
  std::string text;
  uint64_t state = 1;
  const auto pick = [&state](const Strings& words) {
    state = state * 6364136223846793005U + 1442695040888963407U;  // Knuth's MMIX
    return words[(state >> 33U) % words.size()];
  };
  while (text.size() < size) {
    text += pick(subjects) + " " + pick(verbs) + " " + pick(objects) + pick(ends) + " ";
  }
  return text.substr(0, size);
}

std::string last_line(const std::string& text) {
  auto end = text.find_last_not_of('\n');
  if (end == std::string::npos) return "";
  const auto start = text.rfind('\n', end);
  return text.substr(start == std::string::npos ? 0 : start + 1, end - (start + 1) + 1);
}

// Exit code, one line on standard error that names the program, no back-trace, nothing promised.
void expect_failure(const Strings& arguments, int exit_code, const std::string& part) {
  std::string shown;
  for (const auto& argument : arguments) shown += " " + argument;
  SCOPED_TRACE("attn_demo" + shown);
  const auto result = demo(arguments);
  EXPECT_EQ(result.exit_code, exit_code) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  EXPECT_TRUE(result.err.starts_with("attn_demo: ")) << result.err;
  EXPECT_TRUE(result.err.ends_with('\n')) << result.err;
  EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
  for (const char* trace : {"frame #", "Exception raised from", "terminate called", ".cpp"}) {
    EXPECT_EQ(result.err.find(trace), std::string::npos) << result.err;
  }
  EXPECT_EQ(result.out.find("Demo OK."), std::string::npos);
}

void expect_plain(const std::string& text) {
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    ASSERT_TRUE(byte == '\n' || byte >= 0x20) << "control character " << int{byte};
    ASSERT_NE(byte, 0x7F);
  }
}

// Tags are closed in order, attributes quoted, & only in entities: enough of XML for what we write.
void expect_well_formed(const std::string& xml) {
  Strings open;
  size_t roots = 0;
  for (size_t at = 0; at < xml.size(); ++at) {
    if (xml[at] == '&') {
      const auto end = xml.find(';', at);
      ASSERT_LT(end, at + 8) << xml.substr(at, 20);
    }
    if (xml[at] != '<') continue;
    const auto end = xml.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const auto tag = xml.substr(at + 1, end - at - 1);
    at = end;
    ASSERT_FALSE(tag.empty());
    ASSERT_EQ(tag.find('<'), std::string::npos) << tag;
    ASSERT_EQ(std::count(tag.begin(), tag.end(), '"') % 2, 0) << tag;
    if (tag[0] == '?' || tag[0] == '!') continue;
    const auto name = tag.substr(0, tag.find_first_of(" \n/", 1));
    if (tag[0] == '/') {
      ASSERT_FALSE(open.empty());
      ASSERT_EQ(tag.substr(1), open.back());
      open.pop_back();
    } else {
      if (open.empty()) ++roots;
      if (tag.back() != '/') open.push_back(name);
    }
  }
  EXPECT_TRUE(open.empty());
  EXPECT_EQ(roots, 1U);
}

TEST(DemoStory, HoldsAndEndsWithOk) {
  const Folder folder;
  const auto json = folder / "numbers.json";
  const auto svg = folder / "weights.svg";
  const auto result = demo({"--json", json, "--svg", svg});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_EQ(last_line(result.out), "Demo OK.");
  expect_plain(result.out);
  EXPECT_EQ(result.out.find("[FAILED]"), std::string::npos);
  EXPECT_EQ(result.out.find("[--]"), std::string::npos) << "every check applies by default";
  for (const char* part : {"(1, 2, 4, 4)", "0.3175", "0.2455", "2.8808", "0.0501", "0.0036",
                           "8,384", "qkv_proj", "ln 64", "2,694,144"}) {
    EXPECT_NE(result.out.find(part), std::string::npos) << part;
  }

  const auto numbers = nlohmann::json::parse(contents(json));
  EXPECT_EQ(numbers["ok"], true);
  EXPECT_EQ(numbers["device"], "cpu");
  EXPECT_GT(numbers["seconds"], 0.0);
  EXPECT_EQ(numbers["self_attention"]["parameters"], 256);
  EXPECT_EQ(numbers["self_attention"]["q"], (std::vector<int64_t>{1, 2, 4, 4}));
  // The first seed document's numbers, then the second one's.
  const std::vector<double> causal = numbers["causality"]["causal"];
  ASSERT_EQ(causal.size(), 4U);
  EXPECT_EQ(causal[0], 0.0);
  EXPECT_EQ(causal[1], 0.0);
  EXPECT_NEAR(causal[2], 0.3175, 5e-5);
  EXPECT_NEAR(causal[3], 0.2455, 5e-5);
  const std::vector<double> losses = numbers["training"]["epoch_losses"];
  ASSERT_EQ(losses.size(), 3U);
  EXPECT_NEAR(losses[0], 2.8808, 2e-4);
  EXPECT_NEAR(losses[1], 0.0501, 2e-4);
  EXPECT_NEAR(losses[2], 0.0036, 2e-4);
  EXPECT_GT(numbers["block_stack"]["ratio"], 100.0);
  for (const auto& check : numbers["checks"]) EXPECT_EQ(check["holds"], true) << check;
  EXPECT_GE(numbers["checks"].size(), 16U);

  expect_well_formed(contents(svg));
  EXPECT_EQ(folder.entries(), 2U) << "temporary files are left over";
}

TEST(DemoStory, LawsHoldForOtherSeedsAndSizes) {
  const std::vector<Strings> cases = {
      {"--seed", "7"},
      {"--seed", "9223372036854775807", "--epochs", "1"},
      {"--d-model", "2", "--n-heads", "1", "--seq-len", "1", "--epochs", "1", "--threads", "2"},
      {"--d-model", "48", "--n-heads", "3", "--seq-len", "40", "--epochs", "1"},
  };
  for (const auto& arguments : cases) {
    const auto result = demo(arguments);
    EXPECT_EQ(result.exit_code, 0) << arguments[1] << result.out << result.err;
    EXPECT_EQ(last_line(result.out), "Demo OK.");
    EXPECT_NE(result.out.find("[--] not checked"), std::string::npos) << "known numbers are gated";
  }
}

TEST(DemoStory, SameSeedSameNumbers) {
  const Folder folder;
  for (const char* name : {"a", "b"}) {
    EXPECT_EQ(demo({"--seed", "3", "--epochs", "1", "--json", folder / name}).exit_code, 0);
  }
  auto a = nlohmann::json::parse(contents(folder / "a"));
  auto b = nlohmann::json::parse(contents(folder / "b"));
  a.erase("seconds");
  b.erase("seconds");
  EXPECT_EQ(a, b);
}

TEST(DemoOptions, HelpAndVersion) {
  const auto help = demo({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_EQ(help.err, "");
  for (const char* option :
       {"--device", "--seed", "--threads", "--d-model", "--n-heads", "--seq-len", "--epochs",
        "--svg", "--json", "--version", "--help", "--text"}) {
    EXPECT_NE(help.out.find(option), std::string::npos) << option;
  }
  const auto version = demo({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_TRUE(version.out.starts_with("attn ")) << version.out;
  EXPECT_NE(version.out.find("LibTorch "), std::string::npos);
}

TEST(DemoOptions, BadUsageIsExitCode2) {
  expect_failure({"--bogus"}, 2, "--bogus");
  expect_failure({"story"}, 2, "story");
  expect_failure({"--d-model", "33"}, 2, "--d-model must be even, got 33");
  expect_failure({"--d-model", "30"}, 2, "--d-model must be a multiple of --n-heads (4), got 30");
  expect_failure({"--d-model", "2048"}, 2, "from 2 to 1024, got 2048");
  expect_failure({"--d-model", "99999999999999999999"}, 2, "--d-model");
  expect_failure({"--d-model", "32.5"}, 2, "whole number");
  expect_failure({"--seq-len", "0"}, 2, "--seq-len");
  expect_failure({"--seq-len", "100000"}, 2, "--seq-len");
  expect_failure({"--epochs", "0"}, 2, "--epochs");
  expect_failure({"--threads", "-1"}, 2, "got -1");
  expect_failure({"--seed", "-1"}, 2, "got -1");
  expect_failure({"--seed", "1", "--seed", "2"}, 2, "--seed");
  expect_failure({"--d-model", "512", "--n-heads", "512", "--seq-len", "512"}, 2, "--seq-len");
  for (const char* device : {"tpu", "cuda:x", "cuda:01"}) {
    expect_failure({"--device", device}, 2, "--device");
  }
  expect_failure({"--text", ""}, 2, "--text must name a file");
  expect_failure({"--json"}, 2, "--json");
  expect_failure({"--svg", "same", "--json", "same"}, 2, "two files");
  expect_failure({"--x\x1b[31m\ny"}, 2, "\\x1b[31m\\n");
}

TEST(DemoOptions, AbsentDeviceIsExitCode1) {
  expect_failure({"--device", "cuda:99"}, 1, "cuda:99");
}

TEST(DemoFiles, UnusableTextIsExitCode1) {
  const Folder folder;
  expect_failure({"--text", folder / "missing"}, 1, "No such file");
  expect_failure({"--text", folder / ""}, 1, "directory");
  expect_failure({"--text", folder.file("empty", "")}, 1, "got 0");
  expect_failure({"--text", folder.file("tiny", "to be, or not to be")}, 1, "got 19");
  expect_failure({"--text", folder.file("constant", std::string(4000, 'a'))}, 1, "more than one");
  const auto text = folder.file("text", english(4000));
  expect_failure({"--text", text, "--seq-len", "512"}, 1, "at least");
}

TEST(DemoFiles, UnreadableTextIsExitCode1) {
  if (geteuid() == 0) GTEST_SKIP() << "root reads everything";
  const Folder folder;
  const auto text = folder.file("secret", english(4000));
  chmod(text.c_str(), 0);
  expect_failure({"--text", text}, 1, "Permission denied");
}

TEST(DemoFiles, UnwritableResultIsExitCode1) {
  const Folder folder;
  for (const char* option : {"--json", "--svg"}) {
    expect_failure({option, folder / "no/such/folder"}, 1, "No such file");
    expect_failure({option, folder / ""}, 1, "directory");
    expect_failure({option, folder.file("file", "") + "/below"}, 1, "Not a directory");
  }
}

TEST(DemoFiles, ReplacesTheFileThatALinkPointsTo) {
  const Folder folder;
  const auto target = folder.file("target", "old");
  fs::create_symlink("target", folder / "link");
  EXPECT_EQ(demo({"--epochs", "1", "--json", folder / "link"}).exit_code, 0);
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_TRUE(nlohmann::json::accept(contents(target)));
  EXPECT_EQ(folder.entries(), 2U);
}

TEST(DemoFiles, WritesToADeviceWithoutReplacingIt) {
  const auto result = demo({"--epochs", "1", "--json", "/dev/stdout", "--svg", "/dev/null"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("\"epoch_losses\""), std::string::npos);
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST(DemoOutput, ATerminalGetsColoursAndAProgressBar) {
  const auto result = demo({}, {"TERM=xterm", "NO_COLOR"}, Out::terminal);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("\x1b[32m"), std::string::npos);
  EXPECT_NE(result.out.find("\r\x1b[K  epoch 1/3  ["), std::string::npos);
}

TEST(DemoOutput, NoColorKeepsTheProgressBar) {
  const auto result = demo({}, {"TERM=xterm", "NO_COLOR=1"}, Out::terminal);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("\r\x1b[K  epoch 1/3  ["), std::string::npos);
  for (size_t at = 0; (at = result.out.find('\x1b', at)) != std::string::npos; ++at) {
    ASSERT_EQ(result.out.substr(at, 3), "\x1b[K");
  }
}

TEST(DemoOutput, ADumbTerminalGetsPlainLines) {
  for (const char* term : {"TERM=dumb", "TERM"}) {
    auto result = demo({"--epochs", "1"}, {term, "NO_COLOR"}, Out::terminal);
    EXPECT_EQ(result.exit_code, 0);
    // The terminal itself makes \r\n of \n.
    for (size_t at = 0; (at = result.out.find("\r\n", at)) != std::string::npos;) {
      result.out.erase(at, 1);
    }
    expect_plain(result.out);
  }
}

TEST(DemoOutput, AReaderThatLeavesEndsItSilently) {
  const auto result = demo({}, {}, Out::closed);
  EXPECT_EQ(result.signal, SIGPIPE);
  EXPECT_EQ(result.err, "");
}

TEST(DemoOutput, AFullDiskIsAnError) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const auto result = demo({}, {}, Out::full);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.err, "attn_demo: cannot write to standard output: No space left on device\n");
}

// Of the whole text, in nats per byte.
double unigram_entropy(const std::string& text) {
  std::vector<double> counts(256, 0.0);
  for (const char c : text) ++counts[static_cast<unsigned char>(c)];
  double sum = 0.0;
  for (const double n : counts)
    sum -= n > 0.0 ? n * std::log(n / static_cast<double>(text.size())) : 0.0;
  return sum / static_cast<double>(text.size());
}

void expect_learned(const std::string& path, const std::string& epochs, const Folder& folder) {
  const auto json = folder / "numbers.json";
  const auto svg = folder / "weights.svg";
  const auto result = demo({"--text", path, "--epochs", epochs, "--json", json, "--svg", svg});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(last_line(result.out), "Demo OK.");
  expect_plain(result.out);
  const auto numbers = nlohmann::json::parse(contents(json));
  const auto bytes = contents(path);
  EXPECT_EQ(numbers["text"]["bytes"], bytes.size());
  EXPECT_NEAR(numbers["text"]["held_out_bytes"].get<double>(),
              static_cast<double>(bytes.size()) / 10.0, 10.0);
  EXPECT_NEAR(numbers["text"]["unigram_entropy"], unigram_entropy(bytes), 1e-9);
  EXPECT_LT(numbers["loss"]["tiny_attention_lm_held_out"], unigram_entropy(bytes));
  EXPECT_LT(numbers["loss"]["tiny_attention_lm_held_out"], numbers["loss"]["unigram_held_out"]);
  EXPECT_GT(numbers["loss"]["tiny_attention_lm_training"], 0.0);
  EXPECT_FALSE(numbers["continuation"]["text"].get<std::string>().empty());
  expect_well_formed(contents(svg));
}

TEST(DemoText, BeatsTheUnigramModel) {
  const Folder folder;
  expect_learned(folder.file("text", english(10000)), "2", folder);
}

TEST(DemoText, BeatsTheUnigramModelOnALicence) {
  const std::string path = "/usr/share/common-licenses/GPL-3";
  if (!fs::exists(path)) GTEST_SKIP() << "no " << path << " here";
  expect_learned(path, "5", Folder());
}

TEST(DemoText, PrintsNoByteThatATerminalActsOn) {
  // Escape codes, bells, stray continuation bytes, NUL, C1 controls, direction overrides, good
  // UTF-8.
  std::string text;
  while (text.size() < 6000) {
    text += "caf\xc3\xa9 \x1b[2J\x07\x80\xff\r\t";
    text += '\0';
    text += "\xc2\x9b \xe2\x80\xae \xf0\x9f\x98\x80 <&>\"\n";
  }
  const Folder folder;
  const auto result = demo({"--text", folder.file("wild", text), "--epochs", "1", "--json",
                            folder / "json", "--svg", folder / "svg"});
  EXPECT_EQ(result.err, "");
  expect_plain(result.out);
  EXPECT_EQ(result.out.find("\xe2\x80\xae"), std::string::npos);
  EXPECT_EQ(result.out.find("\xc2\x9b"), std::string::npos);
  // nlohmann's parser refuses text that is not UTF-8.
  EXPECT_TRUE(nlohmann::json::accept(nlohmann::json(result.out).dump()));
  EXPECT_TRUE(nlohmann::json::accept(contents(folder / "json")));
  expect_well_formed(contents(folder / "svg"));
}

}  // namespace
