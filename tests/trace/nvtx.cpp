// SPDX-License-Identifier: Apache-2.0
// The ranges as an NVTX tool sees them, through a probe that NVTX loads as it would a profiler. The
// probe answers -1 to every push (case 33).
#include "probe.hpp"
#include "small_job.hpp"

#include <vpkl/trace/range.hpp>

#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

using namespace vpkl;
using namespace vpkl::test;

namespace {

std::vector<ProbeEvent> events_so_far() {
  // Already loaded by NVTX when there are events; loading it again gives the same copy.
  void* const probe = dlopen(VPKL_NVTX_PROBE, RTLD_NOW);
  if (!probe) throw Error(dlerror());
  auto const get = reinterpret_cast<ProbeEvents>(dlsym(probe, "vpkl_probe_events"));
  if (!get) throw Error(dlerror());
  std::int64_t count = 0;
  ProbeEvent const* const first = get(&count);
  return {first, first + count};
}

class NvtxProbe : public testing::Test {
 protected:
  // A wrong path would be silent: every test looks for events that must be there.
  static void SetUpTestSuite() {
    setenv("NVTX_INJECTION64_PATH", VPKL_NVTX_PROBE, 1);
    trace::Range const first(trace::Phase::update, trace::Category::phase, 0);
  }

  void SetUp() override { before_ = events_so_far().size(); }

  /// Pushes and pops since the test began: "a:1(b:2)" is b with payload 2 inside a.
  std::string ranges() {
    std::string text;
    auto const events = events_so_far();
    for (std::size_t i = before_; i < events.size(); ++i) {
      ProbeEvent const& event = events[i];
      EXPECT_STREQ(event.domain_name, "vpkl");
      if (event.kind == ProbeEvent::push) {
        EXPECT_TRUE(event.registered) << event.text;
        EXPECT_TRUE(event.is_int64) << event.text;
        if (!text.empty() && text.back() != '(') text += ' ';
        text += fmt::format("{}@{}:{}(", event.text, event.category_id, event.payload);
      } else {
        EXPECT_EQ(event.kind, ProbeEvent::pop);
        if (!text.empty() && text.back() == '(')
          text.pop_back();
        else
          text += ')';
      }
    }
    return text;
  }

  std::size_t before_ = 0;
};

TEST_F(NvtxProbe, one_domain_with_registered_names_and_categories) {
  std::multiset<std::string> domains, strings;
  std::map<int, std::string> categories;
  for (ProbeEvent const& event : events_so_far()) {
    if (event.kind == ProbeEvent::domain) domains.insert(event.text);
    if (event.kind == ProbeEvent::string) strings.insert(event.text);
    if (event.kind == ProbeEvent::category) categories[event.category_id] = event.text;
    EXPECT_STREQ(event.domain_name, "vpkl");
  }
  EXPECT_EQ(domains, (std::multiset<std::string>{"vpkl"}));
  EXPECT_EQ(strings,
            (std::multiset<std::string>{"rollout", "teacher", "store", "fetch", "statistics",
                                        "combine", "gradient", "update", "chunk"}));
  EXPECT_EQ(categories, (std::map<int, std::string>{
                            {1, "cache"}, {2, "kernel"}, {3, "comm"}, {4, "io"}, {5, "phase"}}));
}

TEST_F(NvtxProbe, payloads_and_nesting_of_a_streamed_loss) {
  SmallJob job;
  job.run();
  std::string expected = fmt::format("store@1:{}", job.stored_rows() * SmallJob::row_bytes);
  for (int chunk = 0; chunk < 3; ++chunk)
    expected += fmt::format(" chunk@5:{0}(fetch@1:{1}) chunk@5:{0}(gradient@2:{2})", chunk,
                            SmallJob::chunk_rows * SmallJob::row_bytes, SmallJob::chunk_rows);
  EXPECT_EQ(ranges(), expected);
}

TEST_F(NvtxProbe, balance_when_an_exception_leaves) {
  SmallJob job(3);
  EXPECT_THROW(job.run(), InvalidArgument);
  EXPECT_EQ(ranges(),
            fmt::format("store@1:{} chunk@5:0(fetch@1:{}) chunk@5:0(gradient@2:{}) "
                        "chunk@5:1 chunk@5:1",
                        11 * SmallJob::row_bytes, SmallJob::chunk_rows * SmallJob::row_bytes,
                        SmallJob::chunk_rows));
}

}  // namespace
