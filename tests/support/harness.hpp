// SPDX-License-Identifier: Apache-2.0
// Runs a divergence plan on whole rows at the size of a communicator and brings the result back
// together; compares it with the oracle.
#pragma once

#include "environment.hpp"
#include "oracle.hpp"
#include "tensor.hpp"

#include <vpkl/divergence/plan.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace vpkl::test {

constexpr Route routes[] = {Route::dense, Route::gathered, Route::vocab_parallel};
constexpr Divergence divergences[] = {Divergence::forward_kl, Divergence::reverse_kl,
                                      Divergence::jsd};
constexpr ElementType element_types[] = {ElementType::fp32, ElementType::bf16, ElementType::fp16};

/// Whole rows of both models.
struct Problem {
  std::int64_t rows = 0, vocabulary = 0;
  std::vector<float> student, teacher;  ///< [rows][vocabulary]
  std::vector<float> weight;            ///< empty: no weights are passed
  DivergenceOptions options;
  ElementType student_type = ElementType::fp32, teacher_type = ElementType::fp32;

  Problem() = default;
  /// One row.
  Problem(std::vector<float> s, std::vector<float> t, DivergenceOptions o = {})
      : rows(1),
        vocabulary(static_cast<std::int64_t>(s.size())),
        student(std::move(s)),
        teacher(std::move(t)),
        options(o) {}
  Problem(std::int64_t r, std::int64_t v)
      : rows(r), vocabulary(v), student(static_cast<std::size_t>(r * v)), teacher(student) {}

  float& s(std::int64_t row, std::int64_t id) { return student[row * vocabulary + id]; }
  float& t(std::int64_t row, std::int64_t id) { return teacher[row * vocabulary + id]; }
  std::vector<float> student_row(std::int64_t row) const;
  std::vector<float> teacher_row(std::int64_t row) const;
  float weight_of(std::int64_t row) const { return weight.empty() ? 1.0f : weight[row]; }

  /// Rounds the logits to the element types.
  void round();
};

/// Where the rows lie and how they are handed over.
struct Placement {
  Route route = Route::vocab_parallel;
  std::vector<std::int64_t> bounds;  ///< of the shards; empty: even
  std::int64_t student_padding = 0, teacher_padding = 0;
  std::int64_t student_gap = 0, teacher_gap = 0, gradient_gap = 0;
  std::int64_t student_shift = 0, teacher_shift = 0, gradient_shift = 0;
  RowForm student_form = RowForm::strided, teacher_form = RowForm::strided,
          gradient_form = RowForm::strided;
  bool in_place = false;
  bool values_only = false;
  bool known_teacher = false;      ///< its statistics are, where a plan takes them
  bool empty_records = false;      ///< of a known teacher: nothing is known after all
  std::int64_t rows_per_call = 0;  ///< 0: all
  std::int64_t spare_rows = 0;     ///< plan's max_rows beyond the largest call

  std::string describe() const;
};

struct Outcome {
  std::vector<float> value;
  std::vector<float> gradient;      ///< [rows][vocabulary]
  std::vector<unsigned char> bits;  ///< of the gradient, whole rows
  OperatorCounters plan;
  CommunicationCounters communication;  ///< of the calls alone
};

/// \brief Shards of the vocabulary: even, or drawn at random with empty ones among them.
std::vector<std::int64_t> even_bounds(std::int64_t vocabulary, int ranks);
std::vector<std::int64_t> random_bounds(Random& random, std::int64_t vocabulary, int ranks);
/// \brief Several layouts worth trying for any problem: even, uneven, and each rank empty in turn.
std::vector<std::vector<std::int64_t>> interesting_bounds(std::int64_t vocabulary, int ranks);

/// \brief Collective. Also checks what must hold for every call: padding columns get gradient 0,
/// memory outside rows and the inputs stay as they were, values have the same bits on all ranks.
template <class Exec>
Outcome run(Exec const& exec, Communicator const& comm, Problem const& problem,
            Placement const& placement = {});

/// How far a result may be from the oracle; see the error bounds of the operator.
struct Closeness {
  double value_ratio = 0;     ///< largest error over its bound
  double gradient_ratio = 0;  ///< the same
};

/// \brief Compares with the oracle; adds a failure naming `what` beyond the bounds. All ranks hold
/// the same outcome: each looks at its share of the rows.
Closeness expect_close(Communicator const& comm, Problem const& problem, Outcome const& outcome,
                       std::string const& what, bool with_gradient = true);

/// \brief The same for every row on this rank, where ranks hold different outcomes.
Closeness expect_close(Problem const& problem, Outcome const& outcome, std::string const& what,
                       bool with_gradient = true);

OracleOptions oracle_options(DivergenceOptions const& options);

std::string describe(Problem const& problem);

}  // namespace vpkl::test
