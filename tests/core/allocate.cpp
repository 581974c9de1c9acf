// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>

#include <support/environment.hpp>

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace {

using namespace vpkl;

template <class Exec>
class Allocate : public testing::Test {};
TYPED_TEST_SUITE(Allocate, test::ExecutionSpaces, test::SpaceNames);

TYPED_TEST(Allocate, gives_what_is_asked) {
  TypeParam const exec;
  for (std::size_t bytes : {0, 1, 1000, 1 << 20})
    EXPECT_EQ(impl::allocate_bytes(exec, "vpkl_test::bytes", bytes).size(), bytes);
}

TYPED_TEST(Allocate, too_much_is_a_typed_error_with_both_numbers) {
  TypeParam const exec;
  std::size_t const bytes = std::size_t(1) << 46;
  try {
    impl::allocate_bytes(exec, "vpkl_test::huge", bytes);
    FAIL();
  } catch (OutOfMemory const& error) {
    std::string const text = error.what();
    EXPECT_NE(text.find("vpkl_test::huge"), std::string::npos) << text;
    EXPECT_NE(text.find(std::to_string(bytes)), std::string::npos) << text;
    EXPECT_NE(text.find("available"), std::string::npos) << text;
  }
  EXPECT_EQ(impl::allocate_bytes(exec, "vpkl_test::after", 8).size(), 8u);
}

TEST(HostMemory, is_known) {
  EXPECT_GT(available_host_memory(), std::size_t(1) << 20);
  EXPECT_LT(available_host_memory(), std::size_t(1) << 46);
}

}  // namespace
