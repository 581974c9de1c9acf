// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief What every function of the C interface goes through: status, Kokkos' life, streams.
#pragma once

#include <vpkl.h>

#include <vpkl/core/error.hpp>
#include <vpkl/core/kokkos.hpp>
#include <vpkl/core/rows.hpp>
#include <vpkl/parallel/agreement.hpp>

#include <exception>
#include <utility>

namespace vpkl::capi {

/// \brief Notes the error's text for this thread. \return its status
vpkl_status note(std::exception_ptr const& error) noexcept;

template <class F>
vpkl_status guarded(F&& call) noexcept {
  try {
    call();
    return VPKL_SUCCESS;
  } catch (...) {
    return note(std::current_exception());
  }
}

/// \brief Runs the local part of a collective; its failure is every rank's. For calls whose own
/// first step is an agreement.
template <class F>
void together(Communicator const& comm, F&& local) {
  std::exception_ptr error;
  try {
    local();
  } catch (...) {
    error = std::current_exception();
  }
  if (error) Agreement("C interface").fail(error).exchange(comm);
}

/// Counted, so that Kokkos is not finalised under a living handle.
class Handle {
 public:
  Handle();
  ~Handle();
  Handle(Handle const&) = delete;
  Handle& operator=(Handle const&) = delete;
};

/// \brief Initialises Kokkos if nobody did. \throws InvalidArgument after vpkl_finalize()
void ensure_kokkos();

/// \throws InvalidArgument naming the argument
template <class T>
T& deref(T* pointer, char const* what) {
  if (!pointer) throw InvalidArgument(std::string(what) + ": pointer is null");
  return *pointer;
}

using HostExec = Kokkos::DefaultHostExecutionSpace;

/// \brief The instance that work for `stream` runs on, kept until vpkl_release_stream().
template <class ExecutionSpace>
ExecutionSpace const& instance(void* stream);
template <>
HostExec const& instance<HostExec>(void* stream);
#ifdef VPKL_ENABLE_CUDA
template <>
Kokkos::Cuda const& instance<Kokkos::Cuda>(void* stream);
#endif

template <class T>
struct Tag {
  using Type = T;
};

/// \brief Calls `f(Tag<ExecutionSpace>)`.
/// \throws InvalidArgument for a space this build has not
template <class F>
auto in_space(vpkl_space space, F&& f) {
  ensure_kokkos();
  if (space == VPKL_HOST) return f(Tag<HostExec>{});
#ifdef VPKL_ENABLE_CUDA
  if (space == VPKL_CUDA) return f(Tag<Kokkos::Cuda>{});
#endif
  throw InvalidArgument("space is " + std::to_string(static_cast<int>(space)) +
#ifdef VPKL_ENABLE_CUDA
                        ", expected VPKL_HOST or VPKL_CUDA");
#else
                        ", expected VPKL_HOST: this vpkl was built without CUDA");
#endif
}

/// \brief Refuses memory that work in this space cannot reach: another device's, or of the other
/// side. Null is fine.
template <class ExecutionSpace>
void check_memory(void const* pointer, char const* what);

ElementType element_type(int type, char const* what);
/// \brief Checks the memory as well.
template <class ExecutionSpace>
Rows rows(vpkl_rows const* from, char const* what);

}  // namespace vpkl::capi
