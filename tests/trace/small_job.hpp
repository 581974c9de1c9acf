// SPDX-License-Identifier: Apache-2.0
// A streamed loss of three chunks on one rank, as the trace tests listen to it.
#pragma once

#include <vpkl/core/error.hpp>
#include <vpkl/parallel/communicator.hpp>
#include <vpkl/training/streamed_loss.hpp>
#include <vpkl/vocab/shard.hpp>

#include <cstdint>
#include <vector>

namespace vpkl::test {

/// [2, 6, 5] fp32 logits on the host; all positions of the response count but the last.
class SmallJob {
 public:
  using Exec = Kokkos::DefaultHostExecutionSpace;
  static constexpr std::int64_t batch = 2, length = 6, width = 5, chunk_width = 2;
  static constexpr std::int64_t row_bytes = width * 4, chunk_rows = batch * chunk_width;

  /// \param[in] missing a row that counts and that the cache does not hold; negative for none
  explicit SmallJob(std::int64_t missing = -1)
      : cache_(Communicator::self(), cache_options(missing)),
        loss_(Communicator::self(), VocabShard::whole(width), loss_options()) {
    for (std::int64_t row = 0; row < batch * length; ++row)
      if (missing >= 0 && row != missing) kept_.push_back(row);
  }

  void run() {
    cache_.store(exec_, rows(teacher_), batch, length, kept_);
    loss_.compute(exec_, rows(student_), cache_, {mask_.data(), batch, length, 0}, {},
                  rows(gradient_));
  }

  std::int64_t stored_rows() const {
    return kept_.empty() ? batch * length : static_cast<std::int64_t>(kept_.size());
  }

 private:
  static TeacherCache<Exec>::Options cache_options(std::int64_t missing) {
    TeacherCache<Exec>::Options options;
    options.mode = missing < 0 ? CacheMode::all : CacheMode::response;
    return options;
  }
  static StreamedLoss<Exec>::Options loss_options() {
    StreamedLoss<Exec>::Options options;
    options.route = Route::dense;
    options.plan = PlanKind::chunks;
    options.chunk_width = chunk_width;
    return options;
  }
  static Rows rows(std::vector<float>& values) {
    return {values.data(), ElementType::fp32, width, RowIndex::strided(batch * length, width)};
  }

  Exec exec_;
  std::vector<float> teacher_ = std::vector<float>(batch * length * width, 1.0f);
  std::vector<float> student_ = std::vector<float>(batch * length * width, 2.0f);
  std::vector<float> gradient_ = std::vector<float>(batch * length * width);
  std::vector<std::uint8_t> mask_ = std::vector<std::uint8_t>(batch * length, 1);
  std::vector<std::int64_t> kept_;
  TeacherCache<Exec> cache_;
  StreamedLoss<Exec> loss_;
};

}  // namespace vpkl::test
