// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The two matrix products of a language-model head.
#pragma once

#include <vpkl/core/rows.hpp>

#include <cstdint>

namespace vpkl::apps {

/// A contiguous matrix `[rows, columns]` of any element type.
struct Matrix {
  void* data = nullptr;
  ElementType type = ElementType::fp32;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
};

/// \brief `logits = hidden · headᵀ`, summed in fp32 and rounded once to the type of `logits`.
/// \param[in] hidden `[R, H]`
/// \param[in] head `[V, H]`
/// \param[out] logits `[R, V]`
template <class ExecutionSpace>
void head_forward(ExecutionSpace const& exec, Matrix const& hidden, Matrix const& head,
                  Matrix const& logits);

/// \brief `head_gradient += gradientᵀ · hidden` in fp32.
/// \param[in] gradient `[R, V]` of the logits
/// \param[in] hidden `[R, H]`
/// \param[in,out] head_gradient `[V, H]` fp32
template <class ExecutionSpace>
void head_backward(ExecutionSpace const& exec, Matrix const& gradient, Matrix const& hidden,
                   Matrix const& head_gradient);

}  // namespace vpkl::apps
