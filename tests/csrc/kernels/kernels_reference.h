// SPDX-License-Identifier: Apache-2.0
// What the kernels must compute, written one element at a time: rank order, one rounding, exact integers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "base/types.h"
#include "check.h"
#include "kernels/target.h"

namespace farandole::reference {

using kernels::Factors;
using Bytes = std::vector<char>;
using Int128 = __int128;
using UInt128 = unsigned __int128;  // its product wraps

struct Case {
  DType dtype;
  ReduceOp op;
  size_t count;
  Factors factors;
};

template <class T>
T element(const void* from, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(from) + i * sizeof value, sizeof value);
  return value;
}

template <class T>
void put(Bytes& to, size_t i, T value) {
  std::memcpy(to.data() + i * sizeof value, &value, sizeof value);
}

// An IEEE-like small float by arithmetic only; the kernels shift bits. Without infinity the numbers go up to the one
// below the largest bits, which are NaN.
template <int kMantissa, int kLowestExponent, class Bits = uint16_t, bool kHasInfinity = true>
struct SmallFloat {
  using Stored = Bits;
  using Computed = float;
  static constexpr int kSign = 1 << (8 * sizeof(Bits) - 1);
  static constexpr int kTop = (kSign >> kMantissa) - 1;  // the exponent field of infinity
  static constexpr int kBeyond = kHasInfinity ? kTop << kMantissa : kSign - 1;

  static float decode(Bits bits) {
    const int field = (bits & (kSign - 1)) >> kMantissa;
    const int fraction = bits & ((1 << kMantissa) - 1);
    float value =
        (bits & (kSign - 1)) >= kBeyond
            ? (kHasInfinity && fraction == 0 ? INFINITY : NAN)
            : std::ldexp(static_cast<float>(field == 0 ? fraction : fraction + (1 << kMantissa)),
                         kLowestExponent - kMantissa + (field == 0 ? 0 : field - 1));
    return bits & kSign ? -value : value;
  }

  static Bits encode(float value) {
    if (std::isnan(value)) return kBeyond | 1 << (kMantissa - 1);
    const int sign = std::signbit(value) ? kSign : 0;
    if (std::isinf(value)) return static_cast<Bits>(sign | kBeyond);
    const int exponent =
        value == 0 ? kLowestExponent : std::max(std::ilogb(value), kLowestExponent);
    const int64_t units = static_cast<int64_t>(  // to nearest even
        std::nearbyint(std::ldexp(std::fabs(static_cast<double>(value)), kMantissa - exponent)));
    const int64_t bits = (static_cast<int64_t>(exponent - kLowestExponent) << kMantissa) + units;
    return static_cast<Bits>(sign | std::min<int64_t>(bits, kBeyond));
  }
};

using Float8E4M3FN = SmallFloat<3, -6, uint8_t, false>;
using Float8E5M2 = SmallFloat<2, -14, uint8_t>;

template <class T>
struct NativeFloat {
  using Stored = T;
  using Computed = T;
  static T decode(T value) { return value; }
  static T encode(T value) {
    return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
  }
};

template <class T>
T combine(ReduceOp op, T a, T b) {
  if constexpr (std::is_same_v<T, Int128>) {
    if (op == ReduceOp::kProduct) return static_cast<Int128>(static_cast<UInt128>(a) * b);
  }
  if (op == ReduceOp::kProduct) return a * b;
  if (op == ReduceOp::kMin) return b < a || b != b ? b : a;
  if (op == ReduceOp::kMax) return b > a || b != b ? b : a;
  return a + b;
}

template <class Format>
Bytes reduce_floats(const Case& c, const std::vector<Bytes>& inputs) {
  using Stored = typename Format::Stored;
  using T = typename Format::Computed;
  const size_t count = inputs[0].size() / sizeof(Stored);
  Bytes out(inputs[0].size());
  for (size_t i = 0; i < count; ++i) {
    T result{};
    for (size_t q = 0; q < inputs.size(); ++q) {
      const T x =
          Format::decode(element<Stored>(inputs[q].data(), i)) * static_cast<T>(c.factors.pre);
      result = q == 0 ? x : combine(c.op, result, x);
    }
    result = result * static_cast<T>(c.factors.post) / static_cast<T>(c.factors.divisor);
    put(out, i, Format::encode(result));
  }
  return out;
}

template <class T>
T truncated(long double value) {
  using Limits = std::numeric_limits<T>;
  if (value <= static_cast<long double>(Limits::lowest())) return Limits::lowest();
  if (value >= static_cast<long double>(Limits::max())) return Limits::max();
  return static_cast<T>(value);
}

template <class T>
Bytes reduce_integers(const Case& c, const std::vector<Bytes>& inputs) {
  using Of32 = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  using Wide = std::conditional_t<(sizeof(T) < 4), int32_t, Of32>;
  const Factors& f = c.factors;
  Bytes out(inputs[0].size());
  for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
    Int128 result = 0;
    for (size_t q = 0; q < inputs.size(); ++q) {
      const T given = element<T>(inputs[q].data(), i);
      const Int128 x = f.pre == 1 ? given : truncated<T>(f.pre * static_cast<double>(given));
      result = q == 0 ? x : static_cast<Wide>(combine(c.op, result, x));
    }
    if (f.post == 1) {
      put(out, i, static_cast<T>(result / f.divisor));
    } else {
      put(out, i,
          truncated<T>(f.post * static_cast<double>(result) / static_cast<double>(f.divisor)));
    }
  }
  return out;
}

inline Bytes reduce_booleans(const Case& c, const std::vector<Bytes>& inputs) {
  Bytes out(inputs[0].size());
  for (size_t i = 0; i < out.size(); ++i) {
    bool all = true, any = false;
    for (const Bytes& input : inputs) {
      all = all && input[i] != 0;
      any = any || input[i] != 0;
    }
    out[i] = c.op == ReduceOp::kMax ? any : all;
  }
  return out;
}

inline Bytes reduce(const Case& c, const std::vector<Bytes>& inputs) {
  switch (c.dtype) {
    case DType::kUInt8: return reduce_integers<uint8_t>(c, inputs);
    case DType::kInt8: return reduce_integers<int8_t>(c, inputs);
    case DType::kUInt16: return reduce_integers<uint16_t>(c, inputs);
    case DType::kInt16: return reduce_integers<int16_t>(c, inputs);
    case DType::kUInt32: return reduce_integers<uint32_t>(c, inputs);
    case DType::kInt32: return reduce_integers<int32_t>(c, inputs);
    case DType::kUInt64: return reduce_integers<uint64_t>(c, inputs);
    case DType::kInt64: return reduce_integers<int64_t>(c, inputs);
    case DType::kFloat16: return reduce_floats<SmallFloat<10, -14>>(c, inputs);
    case DType::kBFloat16: return reduce_floats<SmallFloat<7, -126>>(c, inputs);
    case DType::kFloat32:
    case DType::kComplex64: return reduce_floats<NativeFloat<float>>(c, inputs);
    case DType::kFloat64:
    case DType::kComplex128: return reduce_floats<NativeFloat<double>>(c, inputs);
    case DType::kFloat8E4M3FN: return reduce_floats<Float8E4M3FN>(c, inputs);
    case DType::kFloat8E5M2: return reduce_floats<Float8E5M2>(c, inputs);
    case DType::kBool: return reduce_booleans(c, inputs);
  }
  check::fail("no such dtype");
}

inline bool is_float(DType d) { return traits_of(d).is_float() || traits_of(d).is_complex(); }

// Half of the elements are any bits at all (NaN, infinities, subnormals, extremes), half are small numbers.
inline Bytes random_input(DType dtype, size_t count, std::mt19937_64& random) {
  const size_t size = size_of(dtype) / (traits_of(dtype).is_complex() ? 2 : 1);
  Bytes out(count * size_of(dtype));
  for (size_t i = 0; i < out.size() / size; ++i) {
    uint64_t bits = random();
    const int small = static_cast<int>(bits % 41) - 20;
    const bool any_bits = (bits >> 32 & 1) != 0;
    if (dtype == DType::kBool) bits = bits % 3;
    if (!any_bits && !is_float(dtype) && dtype != DType::kBool) bits = static_cast<uint64_t>(small);
    if (!any_bits && is_float(dtype)) {
      const float x = static_cast<float>(small) / 8;
      const double y = x;
      bits = 0;
      if (dtype == DType::kFloat16) bits = SmallFloat<10, -14>::encode(x);
      if (dtype == DType::kBFloat16) bits = SmallFloat<7, -126>::encode(x);
      if (dtype == DType::kFloat8E4M3FN) bits = Float8E4M3FN::encode(x);
      if (dtype == DType::kFloat8E5M2) bits = Float8E5M2::encode(x);
      if (size == 4) std::memcpy(&bits, &x, 4);
      if (size == 8) std::memcpy(&bits, &y, 8);
    }
    std::memcpy(out.data() + i * size, &bits, size);  // little-endian
  }
  return out;
}

}  // namespace farandole::reference
