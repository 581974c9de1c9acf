// SPDX-License-Identifier: Apache-2.0
// The pool of pinned memory: reuse, figures, failure.
#include "cuda/device.hpp"

#include <vpkl/core/allocate.hpp>
#include <vpkl/core/cuda/pinned_pool.hpp>
#include <vpkl/core/error.hpp>

#include <cstring>
#include <string>

using namespace vpkl;
using namespace vpkl::test;
using vpkl::impl::cuda::PinnedBlock;

namespace {

// Case 26.
TEST(PinnedMemory, little_more_than_asked_and_no_growth) {
  std::size_t const bytes = (std::size_t(1) << 30) + 1;
  PinnedMemoryUsage const before = pinned_memory_usage();
  { PinnedBlock const block(bytes, PinnedBlock::User::host); }
  PinnedMemoryUsage const once = pinned_memory_usage();
  EXPECT_LE(static_cast<double>(once.bytes - before.bytes), 1.05 * static_cast<double>(bytes));
  EXPECT_GE(once.high_water, before.in_use + bytes);
  EXPECT_EQ(once.in_use, before.in_use);
  for (int i = 0; i < 100; ++i)
    PinnedBlock const block(bytes - static_cast<std::size_t>(i), PinnedBlock::User::host);
  PinnedMemoryUsage const after = pinned_memory_usage();
  EXPECT_EQ(after.bytes, once.bytes);
  EXPECT_EQ(after.allocations, once.allocations);
}

TEST(PinnedMemory, a_block_given_back_while_in_use_is_reused_behind_its_work) {
  Stream first, second;
  std::size_t const bytes = std::size_t(3) << 20;
  DeviceWords const words("words", bytes / 2);
  DeviceWords const old("old", bytes / 2);
  fill(first.exec(), words, 7);
  unsigned char* data = nullptr;
  {
    PinnedBlock block(bytes, PinnedBlock::User::host);
    data = block.data();
    std::memset(data, 1, bytes);
    spin(first.exec(), 50);
    VPKL_CHECK_CUDA(cudaMemcpyAsync(old.data(), data, bytes, cudaMemcpyHostToDevice,
                                    first.exec().cuda_stream()));
    block.used_by(first.exec().cuda_stream());
  }
  std::int64_t const allocations = pinned_memory_usage().allocations;
  PinnedBlock reused(bytes, PinnedBlock::User::stream);
  ASSERT_EQ(reused.data(), data);
  EXPECT_EQ(pinned_memory_usage().allocations, allocations);
  cudaStream_t const stream = second.exec().cuda_stream();
  reused.order(stream);
  VPKL_CHECK_CUDA(
      cudaMemcpyAsync(reused.data(), words.data(), bytes, cudaMemcpyDeviceToHost, stream));
  reused.used_by(stream);
  EXPECT_EQ(others(first.exec(), old, 0x0101), 0);
  VPKL_CHECK_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(reused.data()[0], 7);
}

TEST(PinnedMemory, the_host_never_gets_a_block_in_use) {
  Stream stream;
  std::size_t const bytes = std::size_t(5) << 20;
  unsigned char* data = nullptr;
  {
    PinnedBlock block(bytes, PinnedBlock::User::host);
    data = block.data();
    spin(stream.exec(), 50);
    block.used_by(stream.exec().cuda_stream());
  }
  EXPECT_NE(PinnedBlock(bytes, PinnedBlock::User::host).data(), data);
  VPKL_CHECK_CUDA(cudaStreamSynchronize(stream.exec().cuda_stream()));
}

TEST(PinnedMemory, nothing_for_nothing) {
  PinnedMemoryUsage const before = pinned_memory_usage();
  PinnedBlock const block(0, PinnedBlock::User::stream);
  EXPECT_EQ(block.data(), nullptr);
  EXPECT_EQ(pinned_memory_usage().allocations, before.allocations);
}

// Case 38.
TEST(PinnedMemory, beyond_the_machine) {
  std::size_t const bytes = available_host_memory() / 10 * 100;
  try {
    PinnedBlock const block(bytes, PinnedBlock::User::stream);
    ADD_FAILURE() << bytes << " bytes were pinned";
  } catch (OutOfMemory const& e) {
    std::string const message = e.what();
    EXPECT_NE(message.find("bytes requested"), std::string::npos) << message;
    EXPECT_NE(message.find("bytes available"), std::string::npos) << message;
  }
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  PinnedBlock const block(4096, PinnedBlock::User::host);
  EXPECT_NE(block.data(), nullptr);
}

TEST(CudaCheck, names_the_call_and_clears_the_error) {
  try {
    VPKL_CHECK_CUDA(cudaMemcpy(nullptr, nullptr, 8, static_cast<cudaMemcpyKind>(77)));
    ADD_FAILURE() << "accepted";
  } catch (Error const& e) {
    EXPECT_NE(std::string(e.what()).find("cudaMemcpy(nullptr"), std::string::npos) << e.what();
  }
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

}  // namespace
