// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief The five engines between host and device.
#pragma once

#include "../backend.hpp"
#include "buffers.hpp"

#include <vpkl/core/kokkos.hpp>

#include <memory>

namespace vpkl::transfer {

/// A series whose steps can be taken one by one, for those who measure them in other ways.
class CudaSeries : public Series {
 public:
  /// \brief Spoils the target; done on return.
  virtual void prepare() = 0;
  /// \brief One transfer; done on return.
  virtual void move() = 0;
  /// \return elements of the target that are not as sent
  virtual std::int64_t wrong() = 0;

  Sample transfer() override;
};

/// \brief h2d is TeacherCache's fetch with the engine; d2h, which the library does in one way only,
/// the same five ways in the other direction.
/// \param[in] exec on the stream that copies are enqueued on
std::unique_ptr<CudaSeries> open_h2d(Kokkos::Cuda const& exec, Work const& work);
std::unique_ptr<CudaSeries> open_d2h(Kokkos::Cuda const& exec, Work const& work);

}  // namespace vpkl::transfer
