// SPDX-License-Identifier: Apache-2.0
// A rank that stays away. It comes at last, after the others have given up, so that MPI itself can
// end in order.
#include <support/together.hpp>

#include <gtest/gtest.h>

#include <thread>

namespace {

using namespace vpkl;
using namespace vpkl::test;

TEST(Missed, survivors_give_up_and_their_communicator_is_dead) {
  Communicator comm = world();
  Communicator const other = comm.split(0, comm.rank());
  bool const late = comm.rank() == comm.size() - 1;
  if (late) {
    std::this_thread::sleep_for(std::chrono::seconds(4));
    comm.set_timeout(std::chrono::seconds(20));
    // Its own wait ends: the others' messages are on their way.
    EXPECT_NO_THROW(Agreement("early").equal("x", 1).exchange(comm));
    EXPECT_TRUE(comm.alive());
  } else {
    comm.set_timeout(std::chrono::seconds(1));
    auto const start = std::chrono::steady_clock::now();
    try {
      Agreement("early").equal("x", 1).exchange(comm);
      ADD_FAILURE() << "expected CommunicationError";
    } catch (CommunicationError const& error) {
      std::string const text = error.what();
      EXPECT_NE(text.find("1000 ms"), std::string::npos) << text;
      EXPECT_NE(text.find("rank " + std::to_string(comm.rank())), std::string::npos) << text;
    } catch (Error const& error) {
      ADD_FAILURE() << "another type was thrown: " << error.what();
    }
    auto const waited = std::chrono::steady_clock::now() - start;
    EXPECT_GE(waited, std::chrono::seconds(1));
    EXPECT_LT(waited, std::chrono::seconds(3));
    EXPECT_FALSE(comm.alive());
    // At once, without another wait.
    EXPECT_THROW(Agreement("again").equal("x", 1).exchange(comm), CommunicationError);
    EXPECT_THROW(comm.split(0, 0), CommunicationError);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
  }
  // Another communicator of the same ranks still works.
  EXPECT_NO_THROW(Agreement("other").equal("x", 1).exchange(other));
}

}  // namespace
