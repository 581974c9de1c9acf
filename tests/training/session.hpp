// SPDX-License-Identifier: Apache-2.0
// A streamed loss with everything around it: shards, cache, memory layouts, and the oracle's
// answer.
#pragma once

#include "support/harness.hpp"
#include "support/together.hpp"

#include <vpkl/training/streamed_loss.hpp>

#include <optional>
#include <string>
#include <vector>

namespace vpkl::test {

/// Whole rows of both models, row b·T + t, and what counts of them.
struct MicroBatch {
  Problem problem;
  std::int64_t batch = 0, length = 0;
  std::vector<std::uint8_t> mask;
  Normalization normalization;

  MicroBatch() = default;
  MicroBatch(std::int64_t b, std::int64_t t, std::int64_t vocabulary, std::vector<std::uint8_t> m)
      : problem(b * t, vocabulary), batch(b), length(t), mask(std::move(m)) {}

  bool counts(std::int64_t row) const {
    return (row + 1) % length != 0 && mask[static_cast<std::size_t>(row) + 1] != 0;
  }
  std::int64_t tokens() const;
  /// From the definition: what a token's value is multiplied by in loss and gradient.
  double loss_factor() const;
  double gradient_factor() const;
};

/// \brief Normal logits of a typical spread, a mask with holes; the same on every rank.
MicroBatch random_batch(Random& random, std::int64_t batch, std::int64_t length,
                        std::int64_t vocabulary);

/// How a micro-batch is handed over and cut up.
struct Setup {
  Route route = Route::vocab_parallel;
  PlanKind plan = PlanKind::rows;
  std::int64_t chunk_width = 256;
  bool skip = true;
  CacheMode cache = CacheMode::all;
  std::optional<ElementType> store_type;
  bool statistics = false;                                     ///< the teacher's are kept
  std::vector<std::int64_t> bounds;                            ///< of the shards; empty: even
  std::int64_t student_padding = 0, teacher_padding = 0;       ///< columns
  std::int64_t student_gap = 0, gradient_gap = 0;              ///< elements between rows
  std::int64_t student_batch_gap = 0, gradient_batch_gap = 0;  ///< rows between batch rows
  std::int64_t mask_gap = 0;
  bool flat = false;  ///< rows at one stride instead of [B, T]
  bool in_place = false;
  bool packed = false;  ///< the gradient has the counted rows alone
  bool values_only = false;

  std::string describe() const;
};

/// `[B, T]` rows with rows left out after each batch row.
template <class Exec>
class BatchTensor {
 public:
  BatchTensor(ElementType type, std::int64_t batch, std::int64_t length, std::int64_t width,
              std::int64_t gap, std::int64_t batch_gap, bool flat);

  float get(std::int64_t row, std::int64_t column) const { return tensor_.get(at(row), column); }
  void set(std::int64_t row, std::int64_t column, float v) { tensor_.set(at(row), column, v); }
  std::vector<unsigned char> bits(std::int64_t row, std::int64_t n) const {
    return tensor_.bits(at(row), n);
  }
  std::int64_t width() const { return tensor_.width(); }
  void to_device() { tensor_.to_device(); }
  void to_host() { tensor_.to_host(); }
  Rows rows() const;
  /// Nothing but rows has changed since construction.
  bool untouched() const;

 private:
  std::int64_t at(std::int64_t row) const {
    return row / length_ * (length_ + batch_gap_) + row % length_;
  }

  std::int64_t batch_, length_, batch_gap_;
  bool flat_;
  Tensor<Exec> tensor_;
};

/// What came of a call, whole rows brought together.
struct Streamed {
  LossResult result;
  Outcome rows;  ///< `communication` and `plan` are of this call alone
  CacheCounters cache;
  std::int64_t host_waits = 0;
  std::vector<unsigned char> local;  ///< bits of this rank's gradient columns
};

/// One micro-batch on the ranks of a communicator. The public members are what compute() passes;
/// tests may bend them. All calls are collective.
template <class Exec>
class Session {
 public:
  Session(Exec const& exec, Communicator comm, MicroBatch batch, Setup setup);
  Session(Session const&) = delete;

  /// \brief The teacher's rows into the cache; the gathered route's are gathered before.
  void store();
  void store(TeacherCache<Exec>& into);
  /// \brief Refills what a call overwrites, and calls.
  LossResult compute();
  /// \brief compute(), then everything that must hold for any call: memory around the rows as it
  /// was, padding columns of the gradient 0, the same bits of loss and values on every rank.
  Streamed run();

  VocabShard shard;
  TeacherCache<Exec> cache;
  StreamedLoss<Exec> loss;
  ConstRows student;
  Rows gradient;
  ResponseMask mask;
  Normalization normalization;

 private:
  void fill();

  Exec exec_;
  Communicator comm_;
  MicroBatch batch_;
  Setup setup_;
  std::vector<std::uint8_t> mask_bytes_;
  BatchTensor<Exec> student_, gradient_;
};

/// \brief One session: store and run.
template <class Exec>
Streamed run_streamed(Exec const& exec, Communicator const& comm, MicroBatch const& batch,
                      Setup const& setup);

/// \brief Collective. Compares loss, values and gradient with the oracle; ranks share the rows.
void expect_right(Communicator const& comm, MicroBatch const& batch, Streamed const& streamed,
                  std::string const& what, bool with_gradient = true);

/// \brief Loss, values and local gradient have the same bits.
void expect_same_bits(Streamed const& a, Streamed const& b, std::string const& what);

}  // namespace vpkl::test
