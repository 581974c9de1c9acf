// SPDX-License-Identifier: Apache-2.0
#include "../clock.hpp"
#include "../pages.hpp"
#include "kernels.hpp"
#include "series.hpp"

#include <vpkl/core/copy_rows.hpp>
#include <vpkl/core/cuda/pinned_pool.hpp>
#include <vpkl/teacher/row_store.hpp>
#include <vpkl/trace/range.hpp>

#include <cstring>
#include <vector>

namespace vpkl::transfer {

namespace {

constexpr unsigned char poison = 0xa5;

class D2h final : public CudaSeries {
 public:
  D2h(Kokkos::Cuda const& exec, Work const& work)
      : exec_(exec),
        stream_(exec.cuda_stream()),
        work_(work),
        engine_(transfer_engine_from_string(work.engine)),
        row_bytes_(work.shape.row_bytes()),
        pitch_(static_cast<std::size_t>(impl::row_pitch(work.shape.vocabulary, work.shape.type)) *
               size_of(work.shape.type)),
        tensor_(static_cast<std::size_t>(work.shape.rows()) * pitch_,
                impl::cuda::PinnedBlock::User::host),
        contiguous_(work.bytes(), impl::cuda::PinnedBlock::User::host),
        offsets_(work.rows.size() * sizeof(std::int64_t), impl::cuda::PinnedBlock::User::host),
        block_(work.bytes()),
        expected_(work.bytes()) {
    std::int64_t const size = static_cast<std::int64_t>(size_of(work.shape.type));
    auto* const offsets = reinterpret_cast<std::int64_t*>(offsets_.data());
    for (std::size_t i = 0; i < work.rows.size(); ++i) {
      offsets[i] = work.rows[i] * static_cast<std::int64_t>(pitch_) / size;
      fill_pattern(expected_.data() + i * row_bytes_, static_cast<std::int64_t>(row_bytes_),
                   work.rows[i] * static_cast<std::int64_t>(row_bytes_));
    }
    // Rows beside those that are moved, which must stay as they are.
    for (std::size_t i = 0; i < work.rows.size(); ++i) {
      std::int64_t const row = work.rows[i];
      if (row > 0 && (i == 0 || work.rows[i - 1] != row - 1)) beside_.push_back(row - 1);
      bool const last = i + 1 == work.rows.size();
      if (row + 1 < work.shape.rows() && (last || work.rows[i + 1] != row + 1))
        beside_.push_back(row + 1);
    }
    for (std::int64_t const row : beside_)
      std::memset(at(row), poison, row_bytes_);
    VPKL_CHECK_CUDA(cudaMemcpyAsync(block_.data(), expected_.data(), work.bytes(),
                                    cudaMemcpyHostToDevice, stream_));
    VPKL_CHECK_CUDA(cudaStreamSynchronize(stream_));
  }

  Sample contiguous() override {
    std::memset(contiguous_.data(), poison, work_.bytes());
    Sample sample;
    sample.seconds = seconds_of([&] { copy_block(contiguous_.data()); });
    bool const same = std::memcmp(contiguous_.data(), expected_.data(), work_.bytes()) == 0;
    sample.wrong = same ? 0 : static_cast<std::int64_t>(work_.bytes() / size_of(work_.shape.type));
    return sample;
  }

  void prepare() override {
    for (std::int64_t const row : work_.rows)
      std::memset(at(row), poison, row_bytes_);
  }

  void move() override {
    trace::Range const range(trace::Phase::store, trace::Category::cache,
                             static_cast<std::int64_t>(work_.bytes()));
    switch (engine_) {
      case TransferEngine::pageable: {
        Pages const fresh(work_.bytes());
        copy_block(fresh.data());
        return unpack(fresh.data());
      }
      case TransferEngine::staged:
        copy_block(contiguous_.data());
        return unpack(contiguous_.data());
      case TransferEngine::pinned_rows: copy_runs(1); break;
      case TransferEngine::mapped: copy_by_kernel(); break;
      default: copy_runs(work_.rows.size()); break;
    }
    VPKL_CHECK_CUDA(cudaStreamSynchronize(stream_));
  }

  std::int64_t wrong() override {
    std::int64_t rows = 0;
    for (std::size_t i = 0; i < work_.rows.size(); ++i)
      rows += std::memcmp(at(work_.rows[i]), expected_.data() + i * row_bytes_, row_bytes_) != 0;
    std::vector<unsigned char> const untouched(row_bytes_, poison);
    for (std::int64_t const row : beside_)
      rows += std::memcmp(at(row), untouched.data(), row_bytes_) != 0;
    return rows * work_.shape.vocabulary;
  }

 private:
  unsigned char* at(std::int64_t row) const {
    return tensor_.data() + static_cast<std::size_t>(row) * pitch_;
  }

  void copy_block(unsigned char* to) {
    VPKL_CHECK_CUDA(
        cudaMemcpyAsync(to, block_.data(), work_.bytes(), cudaMemcpyDeviceToHost, stream_));
    VPKL_CHECK_CUDA(cudaStreamSynchronize(stream_));
  }

  void unpack(unsigned char const* from) {
    for (std::int64_t const row : work_.rows) {
      std::memcpy(at(row), from, row_bytes_);
      from += row_bytes_;
    }
  }

  /// One copy for each run of neighbouring rows, of `longest` at most.
  void copy_runs(std::size_t longest) {
    for (std::size_t first = 0; first < work_.rows.size();) {
      std::size_t last = first + 1;
      while (last < work_.rows.size() && last - first < longest &&
             work_.rows[last] == work_.rows[last - 1] + 1)
        ++last;
      VPKL_CHECK_CUDA(cudaMemcpy2DAsync(at(work_.rows[first]), pitch_,
                                        block_.data() + first * row_bytes_, row_bytes_, row_bytes_,
                                        last - first, cudaMemcpyDeviceToHost, stream_));
      first = last;
    }
  }

  void copy_by_kernel() {
    std::int64_t const count = static_cast<std::int64_t>(work_.rows.size());
    RowIndex index;
    index.count = count;
    index.offsets = reinterpret_cast<std::int64_t const*>(offsets_.data());
    impl::copy_rows(exec_, "vpkl::transfer::mapped",
                    ConstRows{block_.data(), work_.shape.type, work_.shape.vocabulary,
                              RowIndex::strided(count, work_.shape.vocabulary)},
                    0, Rows{tensor_.data(), work_.shape.type, work_.shape.vocabulary, index}, 0,
                    work_.shape.vocabulary);
  }

  Kokkos::Cuda exec_;
  cudaStream_t stream_;
  Work work_;
  TransferEngine engine_;
  std::size_t row_bytes_, pitch_;
  // Of the library's pool: pinned once for all series of a shape.
  impl::cuda::PinnedBlock tensor_, contiguous_, offsets_;
  DeviceBytes block_;
  std::vector<unsigned char> expected_;
  std::vector<std::int64_t> beside_;
};

}  // namespace

std::unique_ptr<CudaSeries> open_d2h(Kokkos::Cuda const& exec, Work const& work) {
  return std::make_unique<D2h>(exec, work);
}

}  // namespace vpkl::transfer
