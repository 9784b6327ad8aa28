// SPDX-License-Identifier: Apache-2.0
// Converts elements to the type that accumulates them (the wide type), and back, for integers with factors or a
// divisor, and for floats that are reduced in two steps (reduce_partials). Do not include std headers here (see
// codec.h).
#pragma once

#include "kernels/codec.h"
#include "kernels/target.h"

namespace farandole::kernels {

// Zero in the wide type of an integer of up to 32 bits. That type holds the sum of thousands of such integers exactly.
template <class Cpu, class T>
constexpr auto wide_zero() {
  if constexpr (sizeof(T) < 4)
    return int32_t{};
  else if constexpr (T(-1) < T(0))
    return int64_t{};
  else
    return uint64_t{};
}

// Integers that are reduced with factors or a divisor. Numbers are truncated towards zero. Numbers outside the type's
// range become its limits, and NaN becomes 0.
template <class Cpu, class T>
struct WideIntegers {
  using Wide = decltype(wide_zero<Cpu, T>());
  static constexpr bool kSigned = T(-1) < T(0);
  static constexpr int kBits = 8 * sizeof(T) - (kSigned ? 1 : 0);
  static constexpr T kHighest = static_cast<T>(~uint64_t{0} >> (64 - kBits));
  static constexpr T kLowest = kSigned ? static_cast<T>(-kHighest - 1) : T(0);
  static constexpr double kBeyond = 2.0 * static_cast<double>(uint64_t{1} << (kBits - 1));

  static T saturate(double value) {
    if (!(value > static_cast<double>(kLowest))) return value == value ? kLowest : T(0);
    return value < kBeyond ? static_cast<T>(value) : kHighest;
  }

  [[gnu::noinline]] static void load(Wide* to, const void* in, size_t from, size_t size,
                                     double pre) {
    const char* at = static_cast<const char*>(in) + from * sizeof(T);
    for (size_t i = 0; i < size; ++i) {
      T x;
      __builtin_memcpy(&x, at + i * sizeof x, sizeof x);
      to[i] = pre == 1.0 ? x : saturate(pre * static_cast<double>(x));
    }
  }

  [[gnu::noinline]] static void store(void* out, size_t from, const Wide* values, size_t size,
                                      const Factors& f) {
    char* at = static_cast<char*>(out) + from * sizeof(T);
    const double divisor = static_cast<double>(f.divisor);
    for (size_t i = 0; i < size; ++i) {
      const T x = f.post == 1.0 ? static_cast<T>(values[i] / static_cast<Wide>(f.divisor))
                                : saturate(f.post * static_cast<double>(values[i]) / divisor);
      __builtin_memcpy(at + i * sizeof x, &x, sizeof x);
    }
  }
};

template <class Cpu, class T>
void widen_integers(void* wide, const void* in, size_t count, const Factors& f) {
  using Integers = WideIntegers<Cpu, T>;
  Integers::load(static_cast<typename Integers::Wide*>(wide), in, 0, count, f.pre);
}

template <class Cpu, class T>
void narrow_integers(void* out, const void* wide, size_t count, const Factors& f) {
  using Integers = WideIntegers<Cpu, T>;
  Integers::store(out, 0, static_cast<const typename Integers::Wide*>(wide), count, f);
}

// Calls step(index of the first element, number of elements) for each vector. The last vector may be incomplete.
template <class Cpu, class Codec, class Step>
void for_each_vector(size_t count, Step&& step) {
  size_t i = 0;
  for (; i + Codec::kLanes <= count; i += Codec::kLanes) step(i, Codec::kLanes);
  if (i < count) step(i, count - i);
}

template <class Cpu, class Codec>
void widen_floats(void* wide, const void* in, size_t count, const Factors& f) {
  constexpr size_t kStored = sizeof(typename Codec::Stored);
  const float pre = static_cast<float>(f.pre);
  for_each_vector<Cpu, Codec>(count, [&](size_t at, size_t size) {
    char stored[Codec::kLanes * kStored] = {};
    __builtin_memcpy(stored, static_cast<const char*>(in) + kStored * at, kStored * size);
    const typename Codec::Lanes lanes = Codec::load(stored) * pre;
    __builtin_memcpy(static_cast<char*>(wide) + 4 * at, &lanes, 4 * size);
  });
}

template <class Cpu, class Codec>
void narrow_floats(void* out, const void* wide, size_t count, const Factors& f) {
  using Lanes = typename Codec::Lanes;
  constexpr size_t kStored = sizeof(typename Codec::Stored);
  const float post = static_cast<float>(f.post), divisor = static_cast<float>(f.divisor);
  for_each_vector<Cpu, Codec>(count, [&](size_t at, size_t size) {
    Lanes lanes{};
    __builtin_memcpy(&lanes, static_cast<const char*>(wide) + 4 * at, 4 * size);
    lanes = lanes * post / divisor;
    lanes = lanes != lanes ? Lanes{} + __builtin_nanf("") : lanes;
    char stored[Codec::kLanes * kStored];
    Codec::store(stored, lanes);
    __builtin_memcpy(static_cast<char*>(out) + kStored * at, stored, kStored * size);
  });
}

}  // namespace farandole::kernels
