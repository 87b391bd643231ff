# Turns the examples of the README and of the public headers into C++ that the compiler sees.
#
#   awk -f extract.awk README.md ../include/attn/*.h > examples_test.cpp   each block without a main: a test
#   awk -v want=program -f extract.awk README.md > program.cpp             the first block with a main
#   awk -v want=output -f extract.awk README.md > program.txt              the ```text block after it
#
# Blocks are ```cpp fences in Markdown, @code ... @endcode in headers. In a test, what a comment promises is checked:
#   std::cout << y.sizes() << '\n';  // [2, 5, 16]
#   bool same = ...;  // true

BEGIN {
  if (want == "") print "// Generated from the README and the public headers.\n#include <attn/attn.h>\n#include <gtest/gtest.h>\n#include <torch/torch.h>\n#include <iostream>\n"
}

function finish() {
  if (kind == "text") {
    if (want == "output" && program_seen && !output_seen) { printf "%s", block; output_seen = 1 }
  } else if (block ~ /int main\(/) {
    if (want == "program" && !program_seen) printf "%s", block
    program_seen = 1
  } else if (want == "") {
    name = FILENAME
    sub(/^.*\//, "", name)
    gsub(/[^A-Za-z0-9]/, "_", name)
    printf "TEST(Examples, %s_line_%d) {\n%s}\n\n", name, start, block
  }
  kind = ""
}

function promise(line,    value, name) {
  if (line ~ /^std::cout << [a-z_]+\.sizes\(\) << '\\n'; +\/\/ \[[0-9, ]+\]$/) {
    name = line; sub(/^std::cout << /, "", name); sub(/\.sizes.*/, "", name)
    value = line; sub(/^.*\[/, "", value); sub(/\]$/, "", value)
    return "EXPECT_EQ(" name ".sizes(), torch::IntArrayRef({" value "}));\n"
  }
  if (line ~ /^bool [a-z_]+ = .*; +\/\/ true$/) {
    name = line; sub(/^bool /, "", name); sub(/ = .*/, "", name)
    return "EXPECT_TRUE(" name ");\n"
  }
  return ""
}

FNR == 1 { kind = "" }
kind == "" && /^```(cpp|text)$/ { kind = substr($0, 4); block = ""; start = FNR; next }
kind == "" && /^ *\/\/\/ @code$/ { kind = "header"; block = ""; start = FNR; next }
kind != "" && (/^```$/ || /^ *\/\/\/ @endcode$/) { finish(); next }
kind == "header" { sub(/^ *\/\/\/ ?/, "") }
kind != "" { block = block $0 "\n" promise($0) }
