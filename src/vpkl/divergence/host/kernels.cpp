// SPDX-License-Identifier: Apache-2.0
#include <vpkl/core/allocate.hpp>
#include <vpkl/divergence/host/block.hpp>
#include <vpkl/divergence/kernels.hpp>

#include <algorithm>

namespace vpkl::impl {

namespace {

using host::Block;
using host::block_columns;

std::int64_t blocks_of(std::int64_t columns) {
  return (columns + block_columns - 1) / block_columns;
}

void const* row_address(ConstRows const& rows, std::int64_t row) {
  return static_cast<unsigned char const*>(rows.data) +
         static_cast<std::size_t>(rows.index(row)) * size_of(rows.type);
}

void* row_address(Rows const& rows, std::int64_t row) {
  return static_cast<unsigned char*>(rows.data) +
         static_cast<std::size_t>(rows.index(row)) * size_of(rows.type);
}

float weight_of(RowJob const& job, std::int64_t row) { return job.weight ? job.weight[row] : 1.0f; }

/// \return columns of the block
int load(RowJob const& job, std::int64_t row, std::int64_t block_index, Block& block) {
  std::int64_t const first = block_index * block_columns;
  int const columns = static_cast<int>(std::min<std::int64_t>(block_columns, job.columns - first));
  auto const* teacher = static_cast<unsigned char const*>(row_address(job.teacher, row)) +
                        static_cast<std::size_t>(job.teacher_first) * size_of(job.teacher.type);
  block.load(job.student.type, row_address(job.student, row), job.teacher.type, teacher, first,
             columns);
  return columns;
}

/// \brief Statistics of one block of a row.
RowStatistics block_statistics(RowJob const& job, std::int64_t row, std::int64_t index,
                               Block& block) {
  if (!job.one_model()) {
    load(job, row, index, block);
    return host::statistics(block, job.options);
  }
  std::int64_t const first = index * block_columns;
  int const columns = static_cast<int>(std::min<std::int64_t>(block_columns, job.columns - first));
  block.load_one(job.student.type, row_address(job.student, row),
                 job.teacher_alone ? job.read_as : job.student.type, first, columns);
  KernelOptions options = job.options;
  options.weighting = Weighting::none;
  return host::statistics(block, options);
}

RowAccumulator accumulator(KernelOptions const& options) {
  return {options.weighting, static_cast<double>(options.scale) / static_cast<double>(logit_unit)};
}

RowStatistics row_statistics(RowJob const& job, std::int64_t row) {
  Block block;
  RowAccumulator sum = accumulator(job.options);
  std::int64_t const blocks = blocks_of(job.columns);
  for (std::int64_t b = 0; b < blocks; ++b)
    sum.add(block_statistics(job, row, b, block));
  return job.one_model() ? job.completed(row, sum.result()) : sum.result();
}

bool has_sums(RowConstants const& constants) { return constants.state == RowState::regular; }

JsdSums row_jsd_sums(RowJob const& job, std::int64_t row, RowConstants const& constants) {
  JsdSums total;
  if (!has_sums(constants)) return total;
  Block block;
  std::int64_t const blocks = blocks_of(job.columns);
  for (std::int64_t b = 0; b < blocks; ++b) {
    load(job, row, b, block);
    JsdSums const part = host::jsd_sums(block, constants, job.options);
    total.student += part.student;
    total.teacher += part.teacher;
  }
  return total;
}

/// Blocks `[first, last)` of a row's gradient.
void row_gradient(RowJob const& job, std::int64_t row, RowConstants const& constants,
                  Rows const& gradient, std::int64_t first, std::int64_t last) {
  Block block;
  alignas(64) float out[block_columns];
  void* const to = row_address(gradient, row);
  float const weight = weight_of(job, row);
  for (std::int64_t b = first; b < last; ++b) {
    int const columns = load(job, row, b, block);
    host::gradient(block, constants, job.options, weight, out);
    host::store(gradient.type, to, b * block_columns, columns, out);
  }
}

/// Value and part `segment` of `segments` of a row's gradient.
void finish_row(RowJob const& job, std::int64_t row, RowStatistics const& merged,
                JsdSums const& sums, std::int64_t segment, std::int64_t segments, float* value,
                Rows const& gradient) {
  if (weight_of(job, row) == 0) {
    if (segment > 0) return;
    value[row] = 0;
    if (gradient.data)
      host::store_zeros(gradient.type, row_address(gradient, row), 0, gradient.width);
    return;
  }
  RowConstants constants = row_constants(merged, job.options.weighting);
  if (job.options.divergence == Divergence::jsd) constants.mean = static_cast<float>(sums.student);
  if (segment == 0) value[row] = divergence_value(merged, sums, constants.state, job.options);
  if (!gradient.data) return;
  std::int64_t const blocks = blocks_of(job.columns);
  row_gradient(job, row, constants, gradient, segment * blocks / segments,
               (segment + 1) * blocks / segments);
  if (segment == 0)
    host::store_zeros(gradient.type, row_address(gradient, row), job.columns, gradient.width);
}

struct StatisticsOfRow {
  RowJob job;
  RowStatistics* out;
  void operator()(std::int64_t row) const {
    out[row] = weight_of(job, row) == 0 ? RowStatistics{} : row_statistics(job, row);
  }
};

/// Tasks are (row, block); each block's record is kept for an ordered fold.
struct StatisticsOfBlock {
  RowJob job;
  std::int64_t blocks;
  RowStatistics* partial;
  void operator()(std::int64_t task) const {
    std::int64_t const row = task / blocks;
    if (weight_of(job, row) == 0) return;
    Block block;
    partial[task] = block_statistics(job, row, task % blocks, block);
  }
};

struct FoldStatistics {
  RowJob job;
  std::int64_t blocks;
  RowStatistics const* partial;
  RowStatistics* out;
  void operator()(std::int64_t row) const {
    RowAccumulator sum = accumulator(job.options);
    if (weight_of(job, row) != 0)
      for (std::int64_t b = 0; b < blocks; ++b)
        sum.add(partial[row * blocks + b]);
    out[row] = job.one_model() && weight_of(job, row) != 0 ? job.completed(row, sum.result())
                                                           : sum.result();
  }
};

struct Combine {
  RowJob job;
  RowStatistics const* gathered;
  int ranks;
  std::int64_t stride;
  RowStatistics* merged;
  void operator()(std::int64_t row) const {
    RowAccumulator sum = accumulator(job.options);
    for (int r = 0; r < ranks; ++r)
      sum.add(gathered[r * stride + row]);
    merged[row] = sum.result();
  }
};

struct SumsOfRow {
  RowJob job;
  RowStatistics const* merged;
  JsdSums* out;
  void operator()(std::int64_t row) const {
    out[row] = weight_of(job, row) == 0
                   ? JsdSums{}
                   : row_jsd_sums(job, row, row_constants(merged[row], job.options.weighting));
  }
};

struct SumsOfBlock {
  RowJob job;
  std::int64_t blocks;
  RowStatistics const* merged;
  JsdSums* partial;
  void operator()(std::int64_t task) const {
    std::int64_t const row = task / blocks;
    partial[task] = JsdSums{};
    if (weight_of(job, row) == 0) return;
    RowConstants const constants = row_constants(merged[row], job.options.weighting);
    if (!has_sums(constants)) return;
    Block block;
    load(job, row, task % blocks, block);
    partial[task] = host::jsd_sums(block, constants, job.options);
  }
};

struct FoldSums {
  std::int64_t blocks;
  JsdSums const* partial;
  JsdSums* out;
  void operator()(std::int64_t row) const {
    JsdSums total;
    for (std::int64_t b = 0; b < blocks; ++b) {
      total.student += partial[row * blocks + b].student;
      total.teacher += partial[row * blocks + b].teacher;
    }
    out[row] = total;
  }
};

/// Tasks are (row, segment of blocks).
struct Finish {
  RowJob job;
  std::int64_t segments;
  RowStatistics const* merged;
  JsdSums const* sums;
  int ranks;
  std::int64_t stride;
  float* value;
  Rows gradient;
  void operator()(std::int64_t task) const {
    std::int64_t const row = task / segments;
    JsdSums total;
    if (sums)
      for (int r = 0; r < ranks; ++r) {
        total.student += sums[r * stride + row].student;
        total.teacher += sums[r * stride + row].teacher;
      }
    finish_row(job, row, merged[row], total, task % segments, segments, value, gradient);
  }
};

/// Tasks are (row, segment of blocks); each block's weighted difference is kept for an ordered
/// fold.
struct FinishKnown {
  RowJob job;
  std::int64_t segments, blocks;
  RowStatistics const* merged;
  double* partial;
  Rows gradient;
  void operator()(std::int64_t task) const {
    std::int64_t const row = task / segments, segment = task % segments;
    double* const to = partial + row * blocks;
    std::int64_t const first = segment * blocks / segments,
                       last = (segment + 1) * blocks / segments;
    run(row, first, last, [&](std::int64_t b, double difference) { to[b] = difference; });
    if (segment == 0) write_zeros(row);
  }
  template <class Keep>
  void run(std::int64_t row, std::int64_t first, std::int64_t last, Keep&& keep) const {
    if (weight_of(job, row) == 0) return;
    RowConstants const constants = row_constants(merged[row], Weighting::teacher);
    Block block;
    alignas(64) float out[block_columns];
    for (std::int64_t b = first; b < last; ++b) {
      int const columns = load(job, row, b, block);
      keep(b, constants.state == RowState::regular
                  ? host::weighted_difference(block, constants, job.options)
                  : 0.0);
      if (!gradient.data) continue;
      host::gradient(block, constants, job.options, weight_of(job, row), out);
      host::store(gradient.type, row_address(gradient, row), b * block_columns, columns, out);
    }
  }
  void write_zeros(std::int64_t row) const {
    if (gradient.data)
      host::store_zeros(gradient.type, row_address(gradient, row),
                        weight_of(job, row) != 0 ? job.columns : 0, gradient.width);
  }
  double share(std::int64_t row, double weighted, bool first) const {
    return weight_of(job, row) != 0 ? forward_kl_share(merged[row], weighted, first, job.options)
                                    : 0.0;
  }
};

struct FinishKnownRow {
  FinishKnown job;
  bool first;
  double* share;
  void operator()(std::int64_t row) const {
    double weighted = 0;
    job.run(row, 0, job.blocks, [&](std::int64_t, double difference) { weighted += difference; });
    job.write_zeros(row);
    share[row] = job.share(row, weighted, first);
  }
};

struct FoldShares {
  FinishKnown job;
  bool first;
  double* share;
  void operator()(std::int64_t row) const {
    double weighted = 0;
    if (weight_of(job.job, row) != 0)
      for (std::int64_t b = 0; b < job.blocks; ++b)
        weighted += job.partial[row * job.blocks + b];
    share[row] = job.share(row, weighted, first);
  }
};

struct AddShares {
  double const* shares;
  int ranks;
  std::int64_t rows;
  double temperature;
  float* value;
  void operator()(std::int64_t row) const {
    value[row] = value_of_shares(shares + row, ranks, rows, temperature);
  }
};

struct Fused {
  RowJob job;
  float* value;
  Rows gradient;
  void operator()(std::int64_t row) const {
    RowStatistics const merged =
        weight_of(job, row) == 0 ? RowStatistics{} : row_statistics(job, row);
    JsdSums sums;
    if (job.options.divergence == Divergence::jsd && weight_of(job, row) != 0)
      sums = row_jsd_sums(job, row, row_constants(merged, job.options.weighting));
    finish_row(job, row, merged, sums, 0, 1, value, gradient);
  }
};

template <class ExecutionSpace, class Functor>
int launch(ExecutionSpace const& exec, char const* label, std::int64_t tasks,
           Functor const& functor) {
  if (tasks == 0) return 0;
  using Policy = Kokkos::RangePolicy<ExecutionSpace, Kokkos::IndexType<std::int64_t>,
                                     Kokkos::Schedule<Kokkos::Dynamic>>;
  Kokkos::parallel_for(label, Policy(exec, 0, tasks), functor);
  return 1;
}

}  // namespace

template <class ExecutionSpace>
DivergenceKernels<ExecutionSpace>::DivergenceKernels(ExecutionSpace const& exec,
                                                     std::int64_t max_rows,
                                                     std::int64_t max_columns)
    : concurrency_(exec.concurrency()) {
  std::int64_t const split_rows = std::min<std::int64_t>(max_rows, concurrency_ - 1);
  std::size_t const bytes =
      static_cast<std::size_t>(split_rows * blocks_of(max_columns)) * sizeof(RowStatistics);
  partials_ = allocate_bytes(exec, "vpkl::DivergencePlan::partials", bytes);
}

template <class ExecutionSpace>
std::int64_t DivergenceKernels<ExecutionSpace>::segments(std::int64_t rows,
                                                         std::int64_t columns) const {
  if (rows == 0 || rows >= concurrency_) return 1;
  return std::clamp<std::int64_t>(blocks_of(columns), 1, 2 * concurrency_);
}

template <class ExecutionSpace>
int DivergenceKernels<ExecutionSpace>::statistics(ExecutionSpace const& exec, RowJob const& job,
                                                  RowStatistics* out) const {
  std::int64_t const rows = job.rows(), blocks = blocks_of(job.columns);
  if (segments(rows, job.columns) == 1) {
    return launch(exec, "vpkl::DivergencePlan::statistics", rows, StatisticsOfRow{job, out});
  }
  auto* const partial = reinterpret_cast<RowStatistics*>(partials_.data());
  int const blocks_launched = launch(exec, "vpkl::DivergencePlan::statistics", rows * blocks,
                                     StatisticsOfBlock{job, blocks, partial});
  return blocks_launched + launch(exec, "vpkl::DivergencePlan::fold", rows,
                                  FoldStatistics{job, blocks, partial, out});
}

template <class ExecutionSpace>
int DivergenceKernels<ExecutionSpace>::combine(ExecutionSpace const& exec, RowJob const& job,
                                               RowStatistics const* gathered, int ranks,
                                               std::int64_t stride, RowStatistics* merged) const {
  return launch(exec, "vpkl::DivergencePlan::combine", job.rows(),
                Combine{job, gathered, ranks, stride, merged});
}

template <class ExecutionSpace>
int DivergenceKernels<ExecutionSpace>::jsd_sums(ExecutionSpace const& exec, RowJob const& job,
                                                RowStatistics const* merged, JsdSums* out) const {
  std::int64_t const rows = job.rows(), blocks = blocks_of(job.columns);
  if (segments(rows, job.columns) == 1) {
    return launch(exec, "vpkl::DivergencePlan::jsd_sums", rows, SumsOfRow{job, merged, out});
  }
  auto* const partial = reinterpret_cast<JsdSums*>(partials_.data());
  int const blocks_launched = launch(exec, "vpkl::DivergencePlan::jsd_sums", rows * blocks,
                                     SumsOfBlock{job, blocks, merged, partial});
  return blocks_launched +
         launch(exec, "vpkl::DivergencePlan::fold", rows, FoldSums{blocks, partial, out});
}

template <class ExecutionSpace>
int DivergenceKernels<ExecutionSpace>::finish(ExecutionSpace const& exec, RowJob const& job,
                                              RowStatistics const* merged, JsdSums const* sums,
                                              int ranks, std::int64_t stride, float* value,
                                              Rows gradient) const {
  std::int64_t const parts = segments(job.rows(), job.columns);
  return launch(exec, "vpkl::DivergencePlan::gradient", job.rows() * parts,
                Finish{job, parts, merged, sums, ranks, stride, value, gradient});
}

template <class ExecutionSpace>
int DivergenceKernels<ExecutionSpace>::finish_known(ExecutionSpace const& exec, RowJob const& job,
                                                    RowStatistics const* merged, bool first,
                                                    double* share, Rows gradient) const {
  std::int64_t const parts = segments(job.rows(), job.columns);
  FinishKnown const finish{
      job,     parts, blocks_of(job.columns), merged, reinterpret_cast<double*>(partials_.data()),
      gradient};
  if (parts == 1)
    return launch(exec, "vpkl::DivergencePlan::gradient", job.rows(),
                  FinishKnownRow{finish, first, share});
  int const launched = launch(exec, "vpkl::DivergencePlan::gradient", job.rows() * parts, finish);
  return launched +
         launch(exec, "vpkl::DivergencePlan::fold", job.rows(), FoldShares{finish, first, share});
}

template <class ExecutionSpace>
int DivergenceKernels<ExecutionSpace>::add_shares(ExecutionSpace const& exec, std::int64_t rows,
                                                  double const* shares, int ranks,
                                                  double temperature, float* value) const {
  return launch(exec, "vpkl::DivergencePlan::values", rows,
                AddShares{shares, ranks, rows, temperature, value});
}

template <class ExecutionSpace>
void teacher_statistics(ExecutionSpace const& exec, ConstRows const& teacher, std::int64_t columns,
                        ElementType type, double temperature, RowStatistics* records) {
  RowJob const job = RowJob::of_teacher(teacher, columns, type, temperature);
  launch(exec, "vpkl::TeacherCache::statistics", job.rows(), StatisticsOfRow{job, records});
}

template <class ExecutionSpace>
int DivergenceKernels<ExecutionSpace>::fused(ExecutionSpace const& exec, RowJob const& job,
                                             RowStatistics* merged, JsdSums* sums, float* value,
                                             Rows gradient) const {
  if (segments(job.rows(), job.columns) == 1)
    return launch(exec, "vpkl::DivergencePlan::fused", job.rows(), Fused{job, value, gradient});
  bool const jsd = job.options.divergence == Divergence::jsd;
  int launched = statistics(exec, job, merged);
  if (jsd) launched += jsd_sums(exec, job, merged, sums);
  return launched + finish(exec, job, merged, jsd ? sums : nullptr, 1, 0, value, gradient);
}

#define VPKL_INSTANTIATE(Exec)                                                               \
  template class DivergenceKernels<Exec>;                                                    \
  template void teacher_statistics(Exec const&, ConstRows const&, std::int64_t, ElementType, \
                                   double, RowStatistics*);
VPKL_FOREACH_HOST_SPACE(VPKL_INSTANTIATE)
#undef VPKL_INSTANTIATE

}  // namespace vpkl::impl
