// SPDX-License-Identifier: Apache-2.0
/// \file
/// \brief Columns of a row in registers: how they are loaded, unpacked and stored.
#pragma once

#include <vpkl/core/element_type.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace vpkl::impl::cuda {

/// A lane works on vectors of 8 neighbouring columns.
constexpr int vector_columns = 8;
/// A warp works on segments: vector v of lane l holds columns 256 v + 8 l ... + 7 of the segment.
constexpr int vectors = 4;
constexpr int lanes = 32;
constexpr int segment_columns = vectors * lanes * vector_columns;

/// \brief Segments of a row.
__host__ __device__ constexpr std::int64_t segments_of(std::int64_t columns) {
  return (columns + segment_columns - 1) / segment_columns;
}

constexpr unsigned all_lanes = 0xffffffffu;

/// Marks rows whose element type is known at run time only; loaded as float.
struct AnyType {};

/// Marks a model that is left out.
struct Absent {};

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ std::uint32_t max_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

__device__ __forceinline__ std::uint32_t max_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t r;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

/// Eight columns as they lie in memory.
template <class T>
struct Vector;

template <class T>
struct TwoByteVector {
  uint4 bits;

  __device__ __forceinline__ std::uint32_t pair(int j) const {
    return j == 0 ? bits.x : j == 1 ? bits.y : j == 2 ? bits.z : bits.w;
  }
  __device__ __forceinline__ void set_pair(int j, std::uint32_t value) {
    if (j == 0) bits.x = value;
    if (j == 1) bits.y = value;
    if (j == 2) bits.z = value;
    if (j == 3) bits.w = value;
  }
  /// The memory must be 16-byte aligned. Not through the read-only path: gradients may take the
  /// student's place.
  __device__ __forceinline__ void load(T const* from) {
    bits = __ldcs(reinterpret_cast<uint4 const*>(from));
  }
  __device__ __forceinline__ void load_shared(void const* from) {
    bits = *static_cast<uint4 const*>(from);
  }
  /// \brief The first `count` columns, any alignment; -inf beyond.
  __device__ __forceinline__ void load_some(T const* from, int count,
                                            std::uint32_t minus_infinity) {
    auto const* const p = reinterpret_cast<std::uint16_t const*>(from);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      std::uint32_t const low = 2 * j < count ? p[2 * j] : minus_infinity;
      std::uint32_t const high = 2 * j + 1 < count ? p[2 * j + 1] : minus_infinity;
      set_pair(j, low | high << 16);
    }
  }
  __device__ __forceinline__ void store(T* to) const { __stcs(reinterpret_cast<uint4*>(to), bits); }
  __device__ __forceinline__ void store_shared(void* to) const { *static_cast<uint4*>(to) = bits; }
  /// \brief The first `count` columns, any alignment.
  __device__ __forceinline__ void store_some(T* to, int count) const {
    auto* const p = reinterpret_cast<std::uint16_t*>(to);
#pragma unroll
    for (int j = 0; j < vector_columns; ++j)
      if (j < count)
        p[j] = static_cast<std::uint16_t>(j % 2 == 0 ? pair(j / 2) : pair(j / 2) >> 16);
  }
};

template <>
struct Vector<bfloat16> : TwoByteVector<bfloat16> {
  __device__ __forceinline__ void load_some(bfloat16 const* from, int count) {
    TwoByteVector::load_some(from, count, 0xff80u);
  }
  __device__ __forceinline__ float get(int j) const {
    return __uint_as_float(j % 2 == 0 ? pair(j / 2) << 16 : pair(j / 2) & 0xffff0000u);
  }
  __device__ __forceinline__ void set(int j, float low, float high) {
    __nv_bfloat162 const two = __floats2bfloat162_rn(low, high);
    set_pair(j, bit_cast<std::uint32_t>(two));
  }
  /// Running maximum that keeps NaN.
  struct Largest {
    std::uint32_t pair = 0xff80ff80u;
    __device__ __forceinline__ void add(Vector const& v) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        pair = max_bf16x2(pair, v.pair(j));
    }
    __device__ __forceinline__ float get() const {
      return max_or_nan(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
  };
};

template <>
struct Vector<half> : TwoByteVector<half> {
  __device__ __forceinline__ void load_some(half const* from, int count) {
    TwoByteVector::load_some(from, count, 0xfc00u);
  }
  __device__ __forceinline__ float get(int j) const {
    std::uint32_t const p = pair(j / 2);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(j % 2 == 0 ? p : p >> 16)));
  }
  __device__ __forceinline__ void set(int j, float low, float high) {
    __half2 const two = __floats2half2_rn(low, high);
    set_pair(j, bit_cast<std::uint32_t>(two));
  }
  struct Largest {
    std::uint32_t pair = 0xfc00fc00u;
    __device__ __forceinline__ void add(Vector const& v) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        pair = max_f16x2(pair, v.pair(j));
    }
    __device__ __forceinline__ float get() const {
      Vector v;
      v.bits.x = pair;
      return max_or_nan(v.get(0), v.get(1));
    }
  };
};

template <>
struct Vector<float> {
  float4 low, high;

  __device__ __forceinline__ float get(int j) const {
    float4 const& h = j < 4 ? low : high;
    return j % 4 == 0 ? h.x : j % 4 == 1 ? h.y : j % 4 == 2 ? h.z : h.w;
  }
  __device__ __forceinline__ void set_one(int j, float value) {
    float4& h = j < 4 ? low : high;
    (j % 4 == 0 ? h.x : j % 4 == 1 ? h.y : j % 4 == 2 ? h.z : h.w) = value;
  }
  __device__ __forceinline__ void set(int j, float first, float second) {
    set_one(2 * j, first);
    set_one(2 * j + 1, second);
  }
  __device__ __forceinline__ void load(float const* from) {
    low = __ldcs(reinterpret_cast<float4 const*>(from));
    high = __ldcs(reinterpret_cast<float4 const*>(from) + 1);
  }
  __device__ __forceinline__ void load_shared(void const* from) {
    low = static_cast<float4 const*>(from)[0];
    high = static_cast<float4 const*>(from)[1];
  }
  __device__ __forceinline__ void load_some(float const* from, int count) {
#pragma unroll
    for (int j = 0; j < vector_columns; ++j)
      set_one(j, j < count ? from[j] : __uint_as_float(0xff800000u));
  }
  __device__ __forceinline__ void store(float* to) const {
    __stcs(reinterpret_cast<float4*>(to), low);
    __stcs(reinterpret_cast<float4*>(to) + 1, high);
  }
  __device__ __forceinline__ void store_shared(void* to) const {
    static_cast<float4*>(to)[0] = low;
    static_cast<float4*>(to)[1] = high;
  }
  __device__ __forceinline__ void store_some(float* to, int count) const {
#pragma unroll
    for (int j = 0; j < vector_columns; ++j)
      if (j < count) to[j] = get(j);
  }
  struct Largest {
    float value = -infinity;
    __device__ __forceinline__ void add(Vector const& v) {
#pragma unroll
      for (int j = 0; j < vector_columns; ++j)
        value = max_or_nan(value, v.get(j));
    }
    __device__ __forceinline__ float get() const { return value; }
  };
};

/// A row as a kernel sees it: where column 0 lies.
template <class T>
struct RowPointer {
  T* at;
  bool aligned;  ///< to 16 bytes

  __device__ __forceinline__ static RowPointer make(void* data, ElementType, std::int64_t element) {
    T* const p = static_cast<T*>(data) + element;
    return {p, (reinterpret_cast<std::uintptr_t>(p) & 15u) == 0};
  }
  using Loaded = Vector<T>;
  /// \brief Vectors of a segment that starts at column `first`; columns from `columns` on are -inf.
  __device__ __forceinline__ void load(std::int64_t first, std::int64_t columns, int lane,
                                       Loaded (&v)[vectors]) const {
    T const* const p = at + first + lane * vector_columns;
    if (aligned && first + segment_columns <= columns) {
#pragma unroll
      for (int i = 0; i < vectors; ++i)
        v[i].load(p + i * lanes * vector_columns);
      return;
    }
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      load_one(first, columns, lane, i, v[i]);
  }
  __device__ __forceinline__ void load_one(std::int64_t first, std::int64_t columns, int lane,
                                           int i, Loaded& v) const {
    std::int64_t const c = first + (i * lanes + lane) * vector_columns;
    std::int64_t const left = columns - c;
    if (aligned && left >= vector_columns)
      v.load(at + c);
    else
      v.load_some(at + c, left < 0                ? 0
                          : left > vector_columns ? vector_columns
                                                  : static_cast<int>(left));
  }
  /// \brief Writes a segment: `columns` end the results, zeros follow up to `width`.
  __device__ __forceinline__ void store(std::int64_t first, std::int64_t columns,
                                        std::int64_t width, int lane,
                                        Vector<T> const (&v)[vectors]) const {
    if (aligned && first + segment_columns <= columns) {
      T* const p = at + first + lane * vector_columns;
#pragma unroll
      for (int i = 0; i < vectors; ++i)
        v[i].store(p + i * lanes * vector_columns);
      return;
    }
#pragma unroll
    for (int i = 0; i < vectors; ++i)
      store_one(first, columns, width, lane, i, v[i]);
  }
  /// \brief Writes vector i of a segment.
  __device__ __forceinline__ void store_one(std::int64_t first, std::int64_t columns,
                                            std::int64_t width, int lane, int i,
                                            Vector<T> v) const {
    std::int64_t const c = first + (i * lanes + lane) * vector_columns;
    if (c + vector_columns > columns) {
#pragma unroll
      for (int j = 0; j < vector_columns; j += 2)
        v.set(j / 2, c + j < columns ? v.get(j) : 0.0f, c + j + 1 < columns ? v.get(j + 1) : 0.0f);
    }
    std::int64_t const left = width - c;
    if (aligned && left >= vector_columns)
      v.store(at + c);
    else if (left > 0)
      v.store_some(at + c, left > vector_columns ? vector_columns : static_cast<int>(left));
  }
};

template <>
struct Vector<AnyType> : Vector<float> {};

template <>
struct Vector<Absent> {
  __device__ __forceinline__ float get(int) const { return __uint_as_float(0xff800000u); }
  struct Largest {
    __device__ __forceinline__ void add(Vector const&) {}
    __device__ __forceinline__ float get() const { return __uint_as_float(0xff800000u); }
  };
};

template <>
struct RowPointer<Absent> {
  using Loaded = Vector<Absent>;
  __device__ __forceinline__ static RowPointer make(void*, ElementType, std::int64_t) { return {}; }
  __device__ __forceinline__ void load(std::int64_t, std::int64_t, int, Loaded (&)[vectors]) const {
  }
  __device__ __forceinline__ void load_one(std::int64_t, std::int64_t, int, int, Loaded&) const {}
};

/// \brief `x` in the nearest value of another type.
__device__ __forceinline__ float rounded(float x, ElementType type) {
  if (type == ElementType::bf16) return __bfloat162float(__float2bfloat16_rn(x));
  if (type == ElementType::fp16) return __half2float(__float2half_rn(x));
  return x;
}

/// Rows of any type: read as float, written rounded. The rare mixtures of types share one kernel.
template <>
struct RowPointer<AnyType> {
  void* at;
  ElementType type;
  ElementType as;  ///< what they are rounded to when read

  __device__ __forceinline__ static RowPointer make(void* data, ElementType type,
                                                    std::int64_t element) {
    return {static_cast<unsigned char*>(data) + element * (type == ElementType::fp32 ? 4 : 2), type,
            type};
  }
  using Loaded = Vector<float>;
  template <class T>
  __device__ __forceinline__ void convert(std::int64_t first, std::int64_t columns, int lane,
                                          Loaded (&v)[vectors]) const {
    RowPointer<T> const row = RowPointer<T>::make(at, type, 0);
    Vector<T> raw[vectors];
    row.load(first, columns, lane, raw);
#pragma unroll
    for (int i = 0; i < vectors; ++i)
#pragma unroll
      for (int j = 0; j < vector_columns; ++j)
        v[i].set_one(j, as == type ? raw[i].get(j) : rounded(raw[i].get(j), as));
  }
  __device__ __forceinline__ void load(std::int64_t first, std::int64_t columns, int lane,
                                       Loaded (&v)[vectors]) const {
    if (type == ElementType::bf16)
      convert<bfloat16>(first, columns, lane, v);
    else if (type == ElementType::fp16)
      convert<half>(first, columns, lane, v);
    else
      convert<float>(first, columns, lane, v);
  }
  __device__ __forceinline__ void load_one(std::int64_t first, std::int64_t columns, int lane,
                                           int i, Loaded& v) const {
    Loaded all[vectors];
    load(first, columns, lane, all);
    v = i == 0 ? all[0] : i == 1 ? all[1] : i == 2 ? all[2] : all[3];
  }
  template <class T>
  __device__ __forceinline__ void store_as(std::int64_t first, std::int64_t columns,
                                           std::int64_t width, int lane,
                                           Vector<float> const (&v)[vectors]) const {
    Vector<T> out[vectors];
#pragma unroll
    for (int i = 0; i < vectors; ++i)
#pragma unroll
      for (int j = 0; j < vector_columns; j += 2)
        out[i].set(j / 2, v[i].get(j), v[i].get(j + 1));
    RowPointer<T>::make(at, type, 0).store(first, columns, width, lane, out);
  }
  __device__ __forceinline__ void store(std::int64_t first, std::int64_t columns,
                                        std::int64_t width, int lane,
                                        Vector<float> const (&v)[vectors]) const {
    if (type == ElementType::bf16)
      store_as<bfloat16>(first, columns, width, lane, v);
    else if (type == ElementType::fp16)
      store_as<half>(first, columns, width, lane, v);
    else
      store_as<float>(first, columns, width, lane, v);
  }
};

}  // namespace vpkl::impl::cuda
