// SPDX-License-Identifier: Apache-2.0
// The element types, with a row of traits for each. A type also has loops in kernels/loops.h and kernels/gpu_move.cu.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/abi.h"

namespace farandole {

// These values are part of the C ABI (farandole.h) and of messages between ranks, so only append to them.
enum class DType : int32_t {
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kComplex64,
  kComplex128,
  kFloat8E4M3FN,
  kFloat8E5M2,
};

enum class NumberKind : uint8_t { kInteger, kFloat, kBool, kComplex };

struct DTypeTraits {
  const char* name;
  size_t size;
  NumberKind kind;
  // The type that GPUs compute with: for a complex number its parts' type, for bool uint8, otherwise the dtype itself.
  DType real;
  DType carrier;  // accumulator; integers use it only if there are factors or a divisor
  int nccl;       // a value of ncclDataType_t, or -1 if NCCL lacks the type
  // Bit patterns of values that reductions use; for a complex type, of each part. Zero always has all bits clear.
  uint64_t one;
  uint64_t highest;  // infinity if the type has one
  uint64_t lowest;   // minus infinity if the type has one
  uint64_t
      not_finite{};  // bits that are all ones only in NaN and infinity; 0 if all values are finite

  constexpr bool is_float() const { return kind == NumberKind::kFloat; }
  constexpr bool is_complex() const { return kind == NumberKind::kComplex; }
  constexpr bool takes_factors() const { return kind != NumberKind::kBool; }
  // False for floats that NCCL does not support. Other types that it does not support are reduced in their carrier
  // type.
  constexpr bool reduces_on_gpus() const { return !is_float() || nccl >= 0; }
};

namespace detail {

template <class T>
constexpr uint64_t bits_of(T value) {
  if constexpr (sizeof(T) == 8) return std::bit_cast<uint64_t>(value);
  if constexpr (sizeof(T) == 4) return std::bit_cast<uint32_t>(value);
  if constexpr (sizeof(T) == 2) return std::bit_cast<uint16_t>(value);
  if constexpr (sizeof(T) == 1) return std::bit_cast<uint8_t>(value);
}

template <class T>
constexpr DTypeTraits integer(const char* name, DType type, DType carrier, int nccl) {
  const uint64_t highest = bits_of(std::numeric_limits<T>::max());
  const uint64_t lowest = bits_of(std::numeric_limits<T>::lowest());
  return {name, sizeof(T), NumberKind::kInteger, type, carrier, nccl, 1, highest, lowest};
}

// Returns the traits of a float type of fewer than 32 bits.
constexpr DTypeTraits small(const char* name, size_t size, DType type, int nccl, uint64_t one,
                            uint64_t highest, uint64_t not_finite) {
  const uint64_t lowest = highest | uint64_t{1} << (8 * size - 1);
  constexpr DType kCarrier = DType::kFloat32;
  return {name, size, NumberKind::kFloat, type, kCarrier, nccl, one, highest, lowest, not_finite};
}

template <class T>
constexpr DTypeTraits real(const char* name, DType type, int nccl) {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  const uint64_t highest = bits_of(kInfinity), lowest = bits_of(-kInfinity), one = bits_of(T(1));
  return {name, sizeof(T), NumberKind::kFloat, type, type, nccl, one, highest, lowest, highest};
}

constexpr DTypeTraits complex(const char* name, DType type, const DTypeTraits& parts) {
  DTypeTraits row = parts;
  row.name = name;
  row.size = 2 * parts.size;
  row.kind = NumberKind::kComplex;
  row.carrier = type;
  row.nccl = -1;
  return row;
}

}  // namespace detail

inline constexpr std::array<DTypeTraits, 17> kDTypes = {{
    detail::integer<uint8_t>("uint8", DType::kUInt8, DType::kInt32, 1),
    detail::integer<int8_t>("int8", DType::kInt8, DType::kInt32, 0),
    detail::integer<uint16_t>("uint16", DType::kUInt16, DType::kInt32, -1),
    detail::integer<int16_t>("int16", DType::kInt16, DType::kInt32, -1),
    detail::integer<uint32_t>("uint32", DType::kUInt32, DType::kUInt64, 3),
    detail::integer<int32_t>("int32", DType::kInt32, DType::kInt64, 2),
    detail::integer<uint64_t>("uint64", DType::kUInt64, DType::kUInt64, 5),
    detail::integer<int64_t>("int64", DType::kInt64, DType::kInt64, 4),
    detail::small("float16", 2, DType::kFloat16, 6, 0x3c00, 0x7c00, 0x7c00),
    detail::small("bfloat16", 2, DType::kBFloat16, 9, 0x3f80, 0x7f80, 0x7f80),
    detail::real<float>("float32", DType::kFloat32, 7),
    detail::real<double>("float64", DType::kFloat64, 8),
    {"bool", 1, NumberKind::kBool, DType::kUInt8, DType::kBool, -1, 1, 1, 0},
    detail::complex("complex64", DType::kComplex64, detail::real<float>("", DType::kFloat32, 7)),
    detail::complex("complex128", DType::kComplex128, detail::real<double>("", DType::kFloat64, 8)),
    detail::small("float8_e4m3fn", 1, DType::kFloat8E4M3FN, -1, 0x38, 0x7e, 0x7f),  // no infinity
    detail::small("float8_e5m2", 1, DType::kFloat8E5M2, -1, 0x3c, 0x7c, 0x7c),
}};
inline constexpr int32_t kDTypeCount = kDTypes.size();
static_assert(FARANDOLE_FLOAT8_E5M2 == kDTypeCount - 1 &&
                  static_cast<int32_t>(DType::kFloat8E5M2) == FARANDOLE_FLOAT8_E5M2,
              "one row for each value of the header's enum, in its order");

constexpr const DTypeTraits& traits_of(DType dtype) {
  return kDTypes.at(static_cast<size_t>(dtype));
}
constexpr size_t size_of(DType dtype) { return traits_of(dtype).size; }
constexpr const char* name_of(DType dtype) { return traits_of(dtype).name; }

}  // namespace farandole
