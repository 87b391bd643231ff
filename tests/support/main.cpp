// Entry of every test executable: as gtest_main, and exit code 77 when nothing but skips was run,
// so that ctest shows a skip as a skip.
#include <gtest/gtest.h>

namespace {
constexpr int kSkippedExitCode = 77;  // SKIP_RETURN_CODE in tests/CMakeLists.txt
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  const auto& suite = *testing::UnitTest::GetInstance();
  const bool only_skips =
      suite.skipped_test_count() > 0 && suite.skipped_test_count() == suite.test_to_run_count();
  return result == 0 && only_skips ? kSkippedExitCode : result;
}
