// SPDX-License-Identifier: Apache-2.0
// The reduction loops. CMakeLists.txt compiles them once for each target (instruction set). They are compiled without
// contraction, so that all targets give the same bits, and with -fwrapv, so that integers wrap as in NumPy.
#pragma once

#include "kernels/codec.h"
#include "kernels/target.h"
#include "kernels/wide.h"

namespace farandole::kernels {

// Each op is one expression, which works for both vectors and scalars. If an operand is NaN, Min and Max return that
// NaN. If both operands are equal (such as -0 and +0), they return the first.
template <class Cpu>
struct Sum {
  template <class V>
  static V combine(V a, V b) {
    return a + b;
  }
};
template <class Cpu>
struct Product {
  template <class V>
  static V combine(V a, V b) {
    return a * b;
  }
};
template <class Cpu>
struct Min {
  template <class V>
  static V combine(V a, V b) {
    return (b < a) | (b != b) ? b : a;
  }
};
template <class Cpu>
struct Max {
  template <class V>
  static V combine(V a, V b) {
    return (b > a) | (b != b) ? b : a;
  }
};

// A scale multiplies every input, and also the result, by factors. The scale Keep changes neither.
template <class Cpu>
struct Keep {
  template <class V>
  V input(V v) const {
    return v;
  }
  template <class V>
  V result(V v) const {
    return v;
  }
};
template <class Cpu, class Lane>
struct Multiply : Keep<Cpu> {
  Lane factor;
  template <class V>
  V result(V v) const {
    return v * factor;
  }
};
template <class Cpu, class Lane>
struct ScaleAndDivide {
  Lane pre, post, divisor;
  template <class V>
  V input(V v) const {
    return v * pre;
  }
  template <class V>
  V result(V v) const {
    return v * post / divisor;
  }
};

template <class Cpu, class Codec, class Op, class Scale>
struct Tiles {
  using Lanes = typename Codec::Lanes;
  static constexpr size_t kStored = sizeof(typename Codec::Stored);
  static constexpr size_t kStep = Codec::kLanes * kStored;  // bytes of one vector in memory

  // Makes all NaNs canonical. Otherwise the compiler would decide which operand's NaN an addition returns.
  static Lanes finish(Lanes lanes, const Scale& scale) {
    lanes = scale.result(lanes);
    if constexpr (Codec::kFloating) lanes = lanes != lanes ? Lanes{} + __builtin_nanf("") : lanes;
    return lanes;
  }

  static Lanes input(const void* in, size_t at, const Scale& scale) {
    return scale.input(Codec::load(static_cast<const char*>(in) + at));
  }

  // Reduces four vectors at `at`. Reads each input once and keeps the accumulators in registers. The loop is unrolled
  // so that each input has its own load instructions, because a prefetcher follows one stream per instruction.
  static void four(char* out, const void* const* in, int n, size_t at, const Scale& scale) {
    Lanes a = input(in[0], at, scale);
    Lanes b = input(in[0], at + kStep, scale);
    Lanes c = input(in[0], at + 2 * kStep, scale);
    Lanes d = input(in[0], at + 3 * kStep, scale);
#pragma GCC unroll 4
    for (int q = 1; q < n; ++q) {
      a = Op::combine(a, input(in[q], at, scale));
      b = Op::combine(b, input(in[q], at + kStep, scale));
      c = Op::combine(c, input(in[q], at + 2 * kStep, scale));
      d = Op::combine(d, input(in[q], at + 3 * kStep, scale));
    }
    Codec::store(out + at, finish(a, scale));
    Codec::store(out + at + kStep, finish(b, scale));
    Codec::store(out + at + 2 * kStep, finish(c, scale));
    Codec::store(out + at + 3 * kStep, finish(d, scale));
  }

  static void one(char* out, const void* const* in, int n, size_t at, const Scale& scale) {
    Lanes a = input(in[0], at, scale);
    for (int q = 1; q < n; ++q) a = Op::combine(a, input(in[q], at, scale));
    Codec::store(out + at, finish(a, scale));
  }

  // Reduces the last `bytes` bytes, fewer than kStep. Pads each input to a full vector.
  static void part(char* out, const void* const* in, int n, size_t at, size_t bytes,
                   const Scale& scale) {
    char padded[kStep] = {};
    Lanes a{};
    for (int q = 0; q < n; ++q) {
      __builtin_memcpy(padded, static_cast<const char*>(in[q]) + at, bytes);
      const Lanes b = input(padded, 0, scale);
      a = q == 0 ? b : Op::combine(a, b);
    }
    Codec::store(padded, finish(a, scale));
    __builtin_memcpy(out + at, padded, bytes);
  }

  [[gnu::noinline]] static void run(void* to, const void* const* in, int n, size_t count,
                                    const Scale& scale) {
    char* out = static_cast<char*>(to);
    const size_t bytes = count * kStored;
    size_t at = 0;
    for (; at + 4 * kStep <= bytes; at += 4 * kStep) four(out, in, n, at, scale);
    for (; at + kStep <= bytes; at += kStep) one(out, in, n, at, scale);
    if (at < bytes) part(out, in, n, at, bytes - at, scale);
  }
};

template <class Cpu, class Codec, class Op>
void reduce_floats(void* out, const void* const* in, int n, size_t count, const Factors& f) {
  using Lane = typename Codec::Lane;
  const bool power_of_two = (f.divisor & (f.divisor - 1)) == 0;  // its reciprocal is exact
  if (f.pre == 1.0 && f.post == 1.0 && f.divisor == 1) {
    Tiles<Cpu, Codec, Op, Keep<Cpu>>::run(out, in, n, count, {});
  } else if (f.pre == 1.0 && (f.post == 1.0 ? power_of_two : f.divisor == 1)) {
    const Lane factor = f.post == 1.0 ? Lane(1) / Lane(f.divisor) : Lane(f.post);
    Tiles<Cpu, Codec, Op, Multiply<Cpu, Lane>>::run(out, in, n, count, {{}, factor});
  } else {
    Tiles<Cpu, Codec, Op, ScaleAndDivide<Cpu, Lane>>::run(
        out, in, n, count, {Lane(f.pre), Lane(f.post), Lane(f.divisor)});
  }
}

template <class Cpu, class T, class Op>
void reduce_integers(void* out, const void* const* in, int n, size_t count, const Factors& f) {
  if (f.pre == 1.0 && f.post == 1.0 && f.divisor == 1) {
    return Tiles<Cpu, Same<Cpu, T>, Op, Keep<Cpu>>::run(out, in, n, count, {});
  }
  using Integers = WideIntegers<Cpu, T>;
  using Wide = typename Integers::Wide;
  constexpr size_t kBlock = 256;
  Wide result[kBlock], next[kBlock];
  const void* const both[] = {result, next};
  for (size_t from = 0; from < count; from += kBlock) {
    const size_t size = count - from < kBlock ? count - from : kBlock;
    Integers::load(result, in[0], from, size, f.pre);
    for (int q = 1; q < n; ++q) {
      Integers::load(next, in[q], from, size, f.pre);
      Tiles<Cpu, Same<Cpu, Wide>, Op, Keep<Cpu>>::run(result, both, 2, size, {});
    }
    Integers::store(out, from, result, size, f);
  }
}

template <class Cpu, class Op>  // ignores factors, which kernels.cc refuses
void reduce_booleans(void* out, const void* const* in, int n, size_t count, const Factors&) {
  Tiles<Cpu, Boolean<Cpu>, Op, Keep<Cpu>>::run(out, in, n, count, {});
}

template <class Cpu, class Codec>
constexpr Row float_row() {
  return {reduce_floats<Cpu, Codec, Sum<Cpu>>, reduce_floats<Cpu, Codec, Min<Cpu>>,
          reduce_floats<Cpu, Codec, Max<Cpu>>, reduce_floats<Cpu, Codec, Product<Cpu>>};
}

template <class Cpu, class Codec>
constexpr Row small_float_row() {
  Row row = float_row<Cpu, Codec>();
  row.widen = widen_floats<Cpu, Codec>;
  row.narrow = narrow_floats<Cpu, Codec>;
  return row;
}

template <class Cpu, class T>
constexpr Row integer_row() {
  return {reduce_integers<Cpu, T, Sum<Cpu>>,
          reduce_integers<Cpu, T, Min<Cpu>>,
          reduce_integers<Cpu, T, Max<Cpu>>,
          reduce_integers<Cpu, T, Product<Cpu>>,
          widen_integers<Cpu, T>,
          narrow_integers<Cpu, T>};
}

template <class Cpu>
constexpr Row boolean_row() {  // the product of 0s and 1s is the minimum
  return {nullptr, reduce_booleans<Cpu, Min<Cpu>>, reduce_booleans<Cpu, Max<Cpu>>,
          reduce_booleans<Cpu, Min<Cpu>>};
}

template <class Cpu, class Part>
constexpr Row complex_row() {  // a complex number is summed as two real numbers
  return {.sum = reduce_floats<Cpu, Same<Cpu, Part>, Sum<Cpu>>};
}

template <class Cpu>
constexpr Target make_target(const char* name) {
  return {
      .name = name,
      .rows =
          {
              integer_row<Cpu, uint8_t>(),
              integer_row<Cpu, int8_t>(),
              integer_row<Cpu, uint16_t>(),
              integer_row<Cpu, int16_t>(),
              integer_row<Cpu, uint32_t>(),
              integer_row<Cpu, int32_t>(),
              integer_row<Cpu, uint64_t>(),
              integer_row<Cpu, int64_t>(),
              small_float_row<Cpu, Float16<Cpu>>(),
              small_float_row<Cpu, BFloat16<Cpu>>(),
              float_row<Cpu, Same<Cpu, float>>(),
              float_row<Cpu, Same<Cpu, double>>(),
              boolean_row<Cpu>(),
              complex_row<Cpu, float>(),
              complex_row<Cpu, double>(),
              small_float_row<Cpu, Float8<Cpu, 3, 0x7f>>(),
              small_float_row<Cpu, Float8<Cpu, 2, 0x7c>>(),
          },
  };
}

}  // namespace farandole::kernels
