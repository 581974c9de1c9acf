// SPDX-License-Identifier: Apache-2.0
#include <support/together.hpp>

#include <gtest/gtest.h>

#include <new>
#include <string>

namespace {

using namespace vpkl;
using namespace vpkl::test;

using Agree = CollectiveTest<Kokkos::DefaultHostExecutionSpace>;

TEST_F(Agree, equal_values_pass_and_told_values_arrive) {
  auto const told = Agreement("subject")
                        .equal("integers", 5)
                        .equal("reals", 0.1)
                        .equal("texts", std::string_view("abc"))
                        .equal_hash("hashes", ~0ull)
                        .tell("rank", comm.rank())
                        .tell("square", comm.rank() * comm.rank())
                        .exchange(comm);
  ASSERT_EQ(told.size(), static_cast<std::size_t>(comm.size()));
  for (int r = 0; r < comm.size(); ++r)
    EXPECT_EQ(told[r], (std::vector<std::int64_t>{r, r * r}));
}

TEST_F(Agree, one_exchange_is_one_record) {
  auto const before = comm.counters();
  Agreement("subject").equal("x", 1).exchange(comm);
  auto const after = comm.counters();
  EXPECT_EQ(after.records - before.records, comm.size() > 1 ? 1 : 0);
  EXPECT_EQ(after.all_gathers, before.all_gathers);
}

TEST_F(Agree, differences_name_rank_and_values) {
  if (comm.size() == 1) GTEST_SKIP() << "needs two ranks";
  for (int odd = 1; odd < comm.size(); ++odd) {
    bool const here = comm.rank() == odd;
    std::string const rank = "on rank " + std::to_string(odd);
    expect_all_throw<AgreementError>(
        comm, [&] { Agreement("subject").equal("sizes", here ? -7 : 3).exchange(comm); },
        {"subject: sizes differ: 3 on rank 0, -7 " + rank});
    expect_all_throw<AgreementError>(
        comm, [&] { Agreement("subject").equal("reals", here ? 0.5 : 0.25).exchange(comm); },
        {"reals differ: 0.25 on rank 0, 0.5 " + rank});
    expect_all_throw<AgreementError>(
        comm,
        [&] {
          Agreement("subject").equal("texts", std::string_view(here ? "b" : "a")).exchange(comm);
        },
        {"texts differ", rank});
    expect_all_throw<AgreementError>(comm,
                                     [&] {
                                       Agreement a("subject");
                                       a.equal("first", 1);
                                       if (here) a.equal("second", 2);
                                       a.exchange(comm);
                                     },
                                     {"1 values on rank 0, 2 " + rank});
    expect_all_throw<AgreementError>(
        comm, [&] { Agreement(here ? "other" : "subject").equal("x", 1).exchange(comm); },
        {"subject", "other"});
    expect_all_throw<AgreementError>(
        comm, [&] { Agreement("subject").equal(here ? "y" : "x", 1).exchange(comm); },
        {"'x'", "'y'"});
  }
}

template <class Error>
void fails_everywhere(Communicator const& comm, std::string const& text) {
  for (int bad = 0; bad < comm.size(); ++bad)
    expect_all_throw<Error>(comm,
                            [&] {
                              Agreement("subject")
                                  .equal("x", comm.rank())  // a failure comes before a difference
                                  .check([&] {
                                    if (comm.rank() == bad) throw Error(text);
                                  })
                                  .exchange(comm);
                            },
                            {from_rank(comm, bad) + text});
}

TEST_F(Agree, a_failure_of_one_rank_is_thrown_by_all_with_its_type) {
  fails_everywhere<InvalidArgument>(comm, "value is 3");
  fails_everywhere<AgreementError>(comm, "ranges");
  fails_everywhere<FileError>(comm, "file.h5: damaged");
  fails_everywhere<OutOfMemory>(comm, "12 bytes requested");
  fails_everywhere<CommunicationError>(comm, "lost");
  fails_everywhere<NumericalError>(comm, "row 3");
  fails_everywhere<Error>(comm, "something");
}

TEST_F(Agree, the_lowest_failing_rank_is_named) {
  if (comm.size() < 3) GTEST_SKIP() << "needs three ranks";
  expect_all_throw<FileError>(comm,
                              [&] {
                                Agreement("subject")
                                    .check([&] {
                                      if (comm.rank() == 1) throw FileError("one");
                                      if (comm.rank() == 2) throw InvalidArgument("two");
                                    })
                                    .exchange(comm);
                              },
                              {"rank 1: one"});
}

TEST_F(Agree, foreign_exceptions_are_classified) {
  if (comm.size() == 1) GTEST_SKIP() << "a single rank rethrows what it has";
  auto const with = [&](auto error) {
    return [&, error] {
      Agreement("subject")
          .check([&] {
            if (comm.rank() == 0) throw error;
          })
          .exchange(comm);
    };
  };
  expect_all_throw<OutOfMemory>(comm, with(std::bad_alloc()), {"rank 0"});
  expect_all_throw<Error>(comm, with(std::runtime_error("odd")), {"rank 0: odd"});
  expect_all_throw<Error>(comm, with(42), {"rank 0: unknown exception"});
}

TEST_F(Agree, long_messages_are_cut_and_the_group_lives_on) {
  if (comm.size() == 1) GTEST_SKIP() << "a single rank rethrows what it has";
  std::string const text(5000, 'x');
  expect_all_throw<InvalidArgument>(
      comm,
      [&] {
        Agreement("subject").fail(std::make_exception_ptr(InvalidArgument(text))).exchange(comm);
      },
      {"rank 0: xxx"});
  EXPECT_NO_THROW(Agreement("subject").equal("x", 1).exchange(comm));
}

TEST(AgreementFields, have_a_limit) {
  Agreement a("subject");
  for (int i = 0; i < Agreement::max_fields; ++i)
    a.equal("x", i);
  EXPECT_THROW(a.equal("x", 0), InvalidArgument);
}

TEST(HashBytes, chains) {
  char const text[] = "vocabulary";
  EXPECT_EQ(hash_bytes(text, 10), hash_bytes(text + 4, 6, hash_bytes(text, 4)));
  EXPECT_NE(hash_bytes(text, 9), hash_bytes(text, 10));
}

}  // namespace
