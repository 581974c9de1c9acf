// SPDX-License-Identifier: Apache-2.0
#include "../clock.hpp"
#include "kernels.hpp"
#include "series.hpp"

#include <vpkl/core/cuda/pinned_pool.hpp>
#include <vpkl/parallel/communicator.hpp>
#include <vpkl/teacher/cache.hpp>

namespace vpkl::transfer {

namespace {

constexpr int poison = 0xa5;

class H2d final : public CudaSeries {
 public:
  H2d(Kokkos::Cuda const& exec, Work const& work)
      : exec_(exec),
        stream_(exec.cuda_stream()),
        work_(work),
        row_bytes_(static_cast<std::int64_t>(work.shape.row_bytes())),
        contiguous_(work.bytes(), impl::cuda::PinnedBlock::User::host),
        out_(work.bytes()),
        cache_(Communicator::self(), options(work)) {
    for (std::size_t i = 0; i < work.rows.size(); ++i)
      fill_pattern(contiguous_.data() + static_cast<std::int64_t>(i) * row_bytes_, row_bytes_,
                   work.rows[i] * row_bytes_);
    std::int64_t const rows = work.shape.rows();
    DeviceBytes const logits(static_cast<std::size_t>(rows * row_bytes_));
    fill_pattern(stream_, logits.data(), rows * row_bytes_, 0);
    cache_.store(exec_,
                 ConstRows{logits.data(), work.shape.type, work.shape.vocabulary,
                           RowIndex::strided(rows, work.shape.vocabulary)},
                 work.shape.batch, work.shape.length);
    VPKL_CHECK_CUDA(cudaStreamSynchronize(stream_));
  }

  Sample contiguous() override {
    prepare();
    Sample sample;
    sample.seconds = seconds_of([&] {
      VPKL_CHECK_CUDA(cudaMemcpyAsync(out_.data(), contiguous_.data(), work_.bytes(),
                                      cudaMemcpyHostToDevice, stream_));
      VPKL_CHECK_CUDA(cudaStreamSynchronize(stream_));
    });
    sample.wrong = wrong();
    return sample;
  }

  void prepare() override {
    VPKL_CHECK_CUDA(cudaMemsetAsync(out_.data(), poison, work_.bytes(), stream_));
    VPKL_CHECK_CUDA(cudaStreamSynchronize(stream_));
  }

  void move() override {
    Rows const out{
        out_.data(), work_.shape.type, work_.shape.vocabulary,
        RowIndex::strided(static_cast<std::int64_t>(work_.rows.size()), work_.shape.vocabulary)};
    if (work_.pattern == Pattern::chunk)
      cache_.fetch_chunk(exec_, work_.begin, work_.begin + work_.chunk_width, out);
    else
      cache_.fetch_rows(exec_, work_.rows, out);
    VPKL_CHECK_CUDA(cudaStreamSynchronize(stream_));
  }

  std::int64_t wrong() override {
    return wrong_elements(stream_, out_.data(), work_.rows, row_bytes_,
                          static_cast<std::int64_t>(size_of(work_.shape.type)));
  }

 private:
  static TeacherCache<Kokkos::Cuda>::Options options(Work const& work) {
    TeacherCache<Kokkos::Cuda>::Options options;
    options.engine = transfer_engine_from_string(work.engine);
    return options;
  }

  Kokkos::Cuda exec_;
  cudaStream_t stream_;
  Work work_;
  std::int64_t row_bytes_;
  impl::cuda::PinnedBlock contiguous_;  // of the library's pool: pinned once for all series
  DeviceBytes out_;
  TeacherCache<Kokkos::Cuda> cache_;
};

}  // namespace

std::unique_ptr<CudaSeries> open_h2d(Kokkos::Cuda const& exec, Work const& work) {
  return std::make_unique<H2d>(exec, work);
}

}  // namespace vpkl::transfer
