// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief One route's heads, cache, loss and optimizer, and its updates.
#pragma once

#include "micro_batch.hpp"
#include "options.hpp"

#include <vpkl/divergence/gather.hpp>
#include <vpkl/parallel/process_grid.hpp>
#include <vpkl/teacher/cache.hpp>
#include <vpkl/training/streamed_loss.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace vpkl::replay {

/// What one update did.
struct UpdateResult {
  double loss = 0;
  bool applied = false;
  double seconds = 0;
  std::int64_t tokens = 0;  ///< response tokens of all replicas, once per tensor-parallel group
};

/// Counts that prove which path ran, of this rank.
struct RouteCounters {
  OperatorCounters operations;
  CommunicationCounters communication;
  CacheCounters cache;
};

/// Student and teacher heads of one route on this rank, from the fixture's state.
///
/// An update is `accumulation_steps` micro-batches through: teacher head, cache, student head,
/// streamed loss, head gradient; then data-parallel reduction and AdamW, skipped on all ranks when
/// loss or gradient is not finite.
class RouteRun {
 public:
  RouteRun(Exec const& exec, ProcessGrid const& grid, Rollouts const& rollouts,
           Options const& options, Route route);

  /// \brief Collective. Update number `update` of a run; batches are assembled before the clock
  /// starts.
  UpdateResult update(std::int64_t update);

  /// \brief Collective. Token-mean divergence over every sample of the fixture, values only.
  double evaluate();

  std::size_t parameters() const { return head_gradient_.size(); }
  std::string master_sha256() const;
  std::uint64_t master_fingerprint() const;
  std::uint64_t teacher_fingerprint() const;
  RouteCounters counters() const;

 private:
  Bytes read_head(Side side);
  apps::Matrix head(Bytes const& weights, ElementType type, std::int64_t hidden_size) const;
  LossResult run(MicroBatch const& batch, Normalization const& normalization, bool backward);
  void cache_teacher(MicroBatch const& batch);
  bool finite_everywhere(double loss);
  double shared_loss(double local) const;

  Exec exec_;
  ProcessGrid const& grid_;
  Rollouts const& rollouts_;
  Options const& options_;
  Route route_;
  Communicator tensor_;
  VocabShard shard_;
  ElementType student_type_, teacher_type_;
  Bytes student_head_, teacher_head_;
  Kokkos::View<float*, Exec::memory_space> head_gradient_;
  std::unique_ptr<apps::AdamW<Exec>> optimizer_;
  std::unique_ptr<TeacherCache<Exec>> cache_;
  std::unique_ptr<StreamedLoss<Exec>> loss_;
  std::unique_ptr<VocabularyGather<Exec>> gather_;
  CommunicationCounters before_;
};

}  // namespace vpkl::replay
