// SPDX-License-Identifier: Apache-2.0
// The ranges as Kokkos Tools see them: names, nesting, balance.
#include "small_job.hpp"

#include <vpkl/rollout/greedy.hpp>
#include <vpkl/trace/range.hpp>

#include <gtest/gtest.h>

#include <string>

using namespace vpkl;
using namespace vpkl::test;
namespace tools = Kokkos::Tools::Experimental;

namespace {

/// Pushes and pops as one text: "a(b c)" is b and c inside a.
std::string seen;
int depth = 0;
bool underflow = false;

void on_push(char const* name) {
  if (!seen.empty() && seen.back() != '(') seen += ' ';
  seen += std::string(name) + '(';
  ++depth;
}
void on_pop() {
  if (seen.back() == '(')
    seen.pop_back();
  else
    seen += ')';
  underflow = underflow || --depth < 0;
}

class KokkosRegions : public testing::Test {
 protected:
  KokkosRegions() {
    seen.clear();
    depth = 0;
    underflow = false;
    tools::set_push_region_callback(on_push);
    tools::set_pop_region_callback(on_pop);
  }
  ~KokkosRegions() override {
    tools::set_push_region_callback(nullptr);
    tools::set_pop_region_callback(nullptr);
    EXPECT_EQ(depth, 0);
    EXPECT_FALSE(underflow);
  }
};

TEST_F(KokkosRegions, streamed_loss) {
  SmallJob().run();
  EXPECT_EQ(seen,
            "vpkl::store "
            "vpkl::chunk(vpkl::fetch) vpkl::chunk(vpkl::gradient) "
            "vpkl::chunk(vpkl::fetch) vpkl::chunk(vpkl::gradient) "
            "vpkl::chunk(vpkl::fetch) vpkl::chunk(vpkl::gradient)");
}

TEST_F(KokkosRegions, an_exception_in_the_middle) {
  // Row 3 belongs to the second chunk.
  EXPECT_THROW(SmallJob(3).run(), InvalidArgument);
  EXPECT_EQ(seen,
            "vpkl::store vpkl::chunk(vpkl::fetch) vpkl::chunk(vpkl::gradient) "
            "vpkl::chunk vpkl::chunk");
}

TEST_F(KokkosRegions, a_store_that_is_refused) {
  TeacherCache<SmallJob::Exec> cache(Communicator::self(), {});
  EXPECT_THROW(
      cache.store({}, ConstRows{nullptr, ElementType::fp32, 4, RowIndex::strided(3, 4)}, 1, 3),
      InvalidArgument);
  EXPECT_EQ(seen, "vpkl::store");
}

TEST_F(KokkosRegions, rollout) {
  float const logits[] = {1, 3, 2};
  auto const tokens =
      greedy_tokens(SmallJob::Exec(), Communicator::self(), VocabShard::whole(3),
                    ConstRows{logits, ElementType::fp32, 3, RowIndex::strided(1, 3)});
  EXPECT_EQ(tokens.at(0), 1);
  EXPECT_EQ(seen, "vpkl::rollout");
}

TEST_F(KokkosRegions, every_phase_has_a_name) {
  using trace::Phase;
  std::string expected;
  for (auto const& [phase, name] :
       {std::pair(Phase::rollout, "rollout"), std::pair(Phase::teacher, "teacher"),
        std::pair(Phase::store, "store"), std::pair(Phase::fetch, "fetch"),
        std::pair(Phase::statistics, "statistics"), std::pair(Phase::combine, "combine"),
        std::pair(Phase::gradient, "gradient"), std::pair(Phase::update, "update"),
        std::pair(Phase::chunk, "chunk")}) {
    trace::Range const range(phase, trace::Category::phase, 0);
    EXPECT_STREQ(to_string(phase), name);
    expected += (expected.empty() ? "vpkl::" : " vpkl::") + std::string(name);
  }
  EXPECT_EQ(seen, expected);
}

}  // namespace
