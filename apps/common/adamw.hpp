// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief AdamW over one parameter tensor with fp32 masters.
#pragma once

#include <vpkl/core/element_type.hpp>
#include <vpkl/core/kokkos.hpp>

#include <cstdint>

namespace vpkl::apps {

/// AdamW (Loshchilov & Hutter 2019): decoupled weight decay, bias-corrected moments. The masters
/// are fp32; `weights` is their rounded copy, which the matrix products use.
template <class ExecutionSpace>
class AdamW {
 public:
  struct Options {
    double learning_rate = 1e-4;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double epsilon = 1e-8;
    double weight_decay = 0.0;
  };
  using Floats = Kokkos::View<float*, typename ExecutionSpace::memory_space>;

  /// \param[in] weights initial weights, `count` elements of `type`
  AdamW(ExecutionSpace const& exec, Options options, void const* weights, ElementType type,
        std::int64_t count);

  /// \brief One update.
  /// \param[in] gradient fp32, `count` elements
  /// \param[out] weights rounded masters
  void step(ExecutionSpace const& exec, float const* gradient, void* weights);

  Floats const& masters() const { return masters_; }

 private:
  Options options_;
  ElementType type_;
  std::int64_t steps_ = 0;
  Floats masters_, first_, second_;
};

}  // namespace vpkl::apps
