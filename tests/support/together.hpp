// SPDX-License-Identifier: Apache-2.0
// Collective expectations: what must hold on every rank at once.
#pragma once

#include "environment.hpp"

#include <vpkl/core/error.hpp>
#include <vpkl/parallel/agreement.hpp>

#include <chrono>
#include <exception>
#include <string>
#include <vector>

namespace vpkl::test {

/// A test body that all ranks run, on one execution space. A rank that is left alone fails soon.
template <class Exec>
class CollectiveTest : public testing::Test {
 protected:
  CollectiveTest() { comm.set_timeout(std::chrono::seconds(30)); }

  bool on_rank(int rank) const { return comm.rank() == rank % comm.size(); }

  Exec exec;
  Communicator comm = world();
};

/// \brief Collective. Calls `f` on every rank; every rank must throw Error with the same message,
/// which holds each of `texts`, within ten seconds.
template <class Error, class F>
void expect_all_throw(Communicator const& comm, F&& f, std::vector<std::string> const& texts) {
  auto const start = std::chrono::steady_clock::now();
  std::string message;
  try {
    f();
    ADD_FAILURE() << "nothing was thrown, expected a message with '"
                  << (texts.empty() ? "" : texts[0]) << "'";
  } catch (Error const& e) {
    message = e.what();
  } catch (std::exception const& e) {
    ADD_FAILURE() << "another type was thrown: " << e.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  for (std::string const& text : texts)
    EXPECT_NE(message.find(text), std::string::npos) << "'" << text << "' in: " << message;
  std::uint64_t const hash = hash_bytes(message.data(), message.size());
  EXPECT_TRUE(all_of(comm, same_on_all_ranks(comm, hash) == hash))
      << "ranks differ in their message; here: " << message;
}

/// \brief "rank 2: " as it heads the message of a failure on one of several ranks.
inline std::string from_rank(Communicator const& comm, int rank) {
  return comm.size() == 1 ? "" : "rank " + std::to_string(rank % comm.size()) + ": ";
}

}  // namespace vpkl::test
