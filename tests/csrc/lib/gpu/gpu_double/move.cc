// SPDX-License-Identifier: Apache-2.0
// The move kernel in host code, written from its description in gpu_chunk.h.
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/types.h"
#include "kernels/gpu_chunk.h"
#include "kernels/kernels_reference.h"
#include "lib/gpu/gpu_double/hardware.h"

namespace farandole::check {
namespace {

using gpu::MoveChunk;
using Half = reference::SmallFloat<10, -14>;
using Brain = reference::SmallFloat<7, -126>;

template <class T>
struct Plain {
  using Stored = T;
  using Computed = T;
  static T decode(T value) { return value; }
  static T encode(T value) { return value; }
};

template <class T>
T saturated(double value) {
  if (value >= static_cast<double>(std::numeric_limits<T>::max())) {
    return std::numeric_limits<T>::max();
  }
  if (value <= static_cast<double>(std::numeric_limits<T>::min())) {
    return std::numeric_limits<T>::min();
  }
  return static_cast<T>(value);
}

template <class From, class To>
void convert(const MoveChunk& chunk) {
  using Source = typename From::Stored;
  using Target = typename To::Stored;
  using Number = typename To::Computed;
  for (unsigned i = 0; i < chunk.elements; ++i) {
    Source raw;
    std::memcpy(&raw, reinterpret_cast<const char*>(chunk.source) + i * sizeof raw, sizeof raw);
    const auto value = From::decode(raw);
    Target result;
    if constexpr (std::is_integral_v<Number>) {
      if (chunk.factor == 1.0) {
        const auto whole = static_cast<__int128>(value) / chunk.divisor;
        result = static_cast<Target>(whole);
      } else {
        result = saturated<Number>(static_cast<double>(value) * chunk.factor / chunk.divisor);
      }
    } else {
      using Wide = std::conditional_t<std::is_same_v<Number, double>, double, float>;
      result = To::encode(
          static_cast<Number>(static_cast<Wide>(value) * static_cast<Wide>(chunk.factor) /
                              static_cast<Wide>(chunk.divisor)));
    }
    std::memcpy(reinterpret_cast<char*>(chunk.target) + i * sizeof result, &result, sizeof result);
  }
}

template <class Body>
void with_format(int type, Body&& body) {
  switch (static_cast<DType>(type)) {
    case DType::kUInt8: return body(Plain<uint8_t>());
    case DType::kInt8: return body(Plain<int8_t>());
    case DType::kUInt16: return body(Plain<uint16_t>());
    case DType::kInt16: return body(Plain<int16_t>());
    case DType::kUInt32: return body(Plain<uint32_t>());
    case DType::kInt32: return body(Plain<int32_t>());
    case DType::kUInt64: return body(Plain<uint64_t>());
    case DType::kInt64: return body(Plain<int64_t>());
    case DType::kFloat16: return body(Half());
    case DType::kBFloat16: return body(Brain());
    case DType::kFloat32: return body(Plain<float>());
    default: return body(Plain<double>());
  }
}

}  // namespace

void move_on_host(const void* chunks, unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    const MoveChunk& chunk = static_cast<const MoveChunk*>(chunks)[i];
    auto* const target = reinterpret_cast<char*>(chunk.target);
    if (chunk.kind == gpu::kCopyBytes) {
      std::memmove(target, reinterpret_cast<const char*>(chunk.source), chunk.elements);
    } else if (chunk.kind == gpu::kFill) {
      const size_t size = size_of(static_cast<DType>(chunk.to));
      for (unsigned k = 0; k < chunk.elements; ++k) {
        std::memcpy(target + k * size, &chunk.pattern, size);
      }
    } else {
      with_format(chunk.from, [&](auto from) {
        with_format(chunk.to, [&](auto to) { convert<decltype(from), decltype(to)>(chunk); });
      });
    }
  }
}

}  // namespace farandole::check
