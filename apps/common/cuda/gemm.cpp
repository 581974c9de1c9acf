// SPDX-License-Identifier: Apache-2.0
#include "gemm.hpp"

#include <vpkl/core/error.hpp>

#include <cublas_v2.h>
#include <fmt/format.h>

namespace vpkl::apps {

namespace {

void check(cublasStatus_t status, char const* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(fmt::format("{} failed: {}", call, cublasGetStatusString(status)));
}

#define VPKL_CHECK_CUBLAS(call) check((call), #call)

/// One handle a process: making one allocates device memory and waits.
cublasHandle_t handle_on(Kokkos::Cuda const& exec) {
  static cublasHandle_t handle = [] {
    cublasHandle_t h = nullptr;
    VPKL_CHECK_CUBLAS(cublasCreate(&h));
    Kokkos::push_finalize_hook([h] { (void)cublasDestroy(h); });
    return h;
  }();
  VPKL_CHECK_CUBLAS(cublasSetStream(handle, exec.cuda_stream()));
  return handle;
}

cudaDataType_t data_type(ElementType type) {
  switch (type) {
    case ElementType::bf16: return CUDA_R_16BF;
    case ElementType::fp16: return CUDA_R_16F;
    case ElementType::fp32: break;
  }
  return CUDA_R_32F;
}

/// What cuBLAS multiplies without copies.
void check_types(char const* what, Matrix const& a, Matrix const& b, Matrix const& c) {
  if (a.type != b.type || (c.type != ElementType::fp32 && c.type != a.type))
    throw InvalidArgument(
        fmt::format("{}: types are {} and {} into {}, expected two equal ones, into the same or "
                    "fp32",
                    what, to_string(a.type), to_string(b.type), to_string(c.type)));
}

}  // namespace

// A row-major [m, n] is cuBLAS' column-major [n, m].

template <>
void head_forward(Kokkos::Cuda const& exec, Matrix const& hidden, Matrix const& head,
                  Matrix const& logits) {
  check_types("head_forward", hidden, head, logits);
  if (logits.rows == 0 || logits.columns == 0) return;
  float const one = 1, zero = 0;
  int const v = static_cast<int>(head.rows), h = static_cast<int>(head.columns);
  VPKL_CHECK_CUBLAS(cublasGemmEx(
      handle_on(exec), CUBLAS_OP_T, CUBLAS_OP_N, v, static_cast<int>(hidden.rows), h, &one,
      head.data, data_type(head.type), h, hidden.data, data_type(hidden.type), h, &zero,
      logits.data, data_type(logits.type), v, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

template <>
void head_backward(Kokkos::Cuda const& exec, Matrix const& gradient, Matrix const& hidden,
                   Matrix const& head_gradient) {
  check_types("head_backward", gradient, hidden, head_gradient);
  if (gradient.rows == 0 || gradient.columns == 0) return;
  float const one = 1;
  int const v = static_cast<int>(gradient.columns), h = static_cast<int>(hidden.columns);
  VPKL_CHECK_CUBLAS(cublasGemmEx(handle_on(exec), CUBLAS_OP_N, CUBLAS_OP_T, h, v,
                                 static_cast<int>(hidden.rows), &one, hidden.data,
                                 data_type(hidden.type), h, gradient.data, data_type(gradient.type),
                                 v, &one, head_gradient.data, data_type(head_gradient.type), h,
                                 CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

}  // namespace vpkl::apps
