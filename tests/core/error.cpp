// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/error.hpp>

#include <gtest/gtest.h>

#include <new>

namespace {

using namespace vpkl;

template <class E>
void goes_both_ways(ErrorKind kind) {
  auto const error = std::make_exception_ptr(E("what happened"));
  EXPECT_EQ(error_kind(error), kind);
  EXPECT_EQ(error_message(error), "what happened");
  EXPECT_THROW(throw_error(kind, "x"), E);
}

TEST(Error, kinds_stand_for_classes) {
  goes_both_ways<InvalidArgument>(ErrorKind::invalid_argument);
  goes_both_ways<AgreementError>(ErrorKind::agreement);
  goes_both_ways<FileError>(ErrorKind::file);
  goes_both_ways<OutOfMemory>(ErrorKind::out_of_memory);
  goes_both_ways<CommunicationError>(ErrorKind::communication);
  goes_both_ways<NumericalError>(ErrorKind::numerical);
  goes_both_ways<Error>(ErrorKind::other);
}

TEST(Error, foreign_exceptions_have_a_kind) {
  EXPECT_EQ(error_kind(nullptr), ErrorKind::none);
  EXPECT_EQ(error_message(nullptr), "");
  EXPECT_EQ(error_kind(std::make_exception_ptr(std::bad_alloc())), ErrorKind::out_of_memory);
  EXPECT_EQ(error_kind(std::make_exception_ptr(3)), ErrorKind::other);
  EXPECT_EQ(error_message(std::make_exception_ptr(3)), "unknown exception");
}

}  // namespace
