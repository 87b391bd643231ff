#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

namespace attn::testing {

/// Every part occurs in the message.
inline ::testing::AssertionResult mentions(const std::string& message,
                                           std::initializer_list<std::string> parts) {
  for (const auto& part : parts) {
    if (message.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << "\"" << part << "\" is not in \"" << message << "\"";
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace attn::testing
