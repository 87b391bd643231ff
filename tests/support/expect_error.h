#pragma once

#include <c10/util/Exception.h>

#include <gtest/gtest.h>

#include <string>

namespace attn::testing {

/// The message of the c10::ValueError that `call` throws; fails when it throws another or none.
template <typename Call>
std::string value_error(Call&& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected c10::ValueError, got: " << error.what();
    return "";
  }
  ADD_FAILURE() << "expected c10::ValueError, nothing was thrown";
  return "";
}

}  // namespace attn::testing
