// SPDX-License-Identifier: Apache-2.0
// Codecs, one for each kind of element. A codec loads `kLanes` elements into lanes (a vector of the type in which they
// are computed) and stores the lanes, rounding each element only once.
//
// `Cpu` is a type in an anonymous namespace (target_*.cc). Every template instance therefore has internal linkage, and
// the linker cannot use code for a newer CPU on an older one. Do not include std headers here: their inline functions
// would have external linkage.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace farandole::kernels {

template <class T, int kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T, int kBytes>
using Vector = typename VectorOf<T, kBytes>::type;

template <class Cpu>
struct Words {  // a vector as float32 lanes, as their bits, and as one 16-bit element per lane
  using Floats = Vector<float, Cpu::kVectorBytes>;
  using Bits = Vector<uint32_t, Cpu::kVectorBytes>;
  using Halves = Vector<uint16_t, Cpu::kVectorBytes / 2>;
};

// Converts 16-bit elements to 32-bit lanes and back with integer arithmetic, for CPUs without conversion instructions.
template <class Cpu>
struct PortableHalves {
  using Floats = typename Words<Cpu>::Floats;
  using Bits = typename Words<Cpu>::Bits;
  using Halves = typename Words<Cpu>::Halves;
  using Signed = Vector<int32_t, Cpu::kVectorBytes>;  // SSE2 compares only signed integers

  static_assert(Cpu::kVectorBytes <= 16 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
  static Bits zero_extend(Halves halves) {
    if constexpr (Cpu::kVectorBytes == 16) {
      return (Bits)__builtin_shufflevector(halves, Halves{}, 0, 4, 1, 5, 2, 6, 3, 7);
    } else {
      return __builtin_convertvector(halves, Bits);
    }
  }
  static Halves truncate(Bits bits) { return __builtin_convertvector(bits, Halves); }

  static Floats widen(Halves halves) {
    const Signed half = (Signed)zero_extend(halves);
    const Signed magnitude = (half & 0x7fff) << 13;
    const Signed normal = magnitude + ((127 - 15) << 23);
    const Signed special = normal + ((128 - 16) << 23);
    // A subnormal is m * 2^-24. The bits are read as the number 2^-14 * (1 + m / 2^10). Subtracting 2^-14 then gives
    // the subnormal exactly.
    const Signed subnormal = (Signed)((Floats)(normal + (1 << 23)) - 0x1p-14f);
    Signed bits = magnitude >= (0x1f << 23) ? special : normal;
    bits = magnitude < (1 << 23) ? subnormal : bits;
    return (Floats)(bits | ((half & 0x8000) << 16));
  }

  static Halves narrow(Floats value) {
    const Signed magnitude = (Signed)value & 0x7fffffff;
    // After adding 0.5f, the low bits hold the float16 subnormal, correctly rounded.
    const Signed subnormal = (Signed)((Floats)magnitude + 0.5f) - (126 << 23);
    const Signed odd = (magnitude >> 13) & 1;
    const Signed normal = (magnitude - ((127 - 15) << 23) + 0xfff + odd) >> 13;
    Signed half = magnitude < ((127 - 14) << 23) ? subnormal : normal;
    half = magnitude >= ((127 + 16) << 23) ? Signed{} + 0x7c00 : half;
    half = magnitude > (0xff << 23) ? Signed{} + 0x7e00 : half;
    return truncate((Bits)half | ((Bits)value >> 31 << 15));
  }
};

// Elements that are computed in the type in which they are stored: float32, float64 and all integers.
template <class Cpu, class T>
struct Same {
  static constexpr int kBytes = Cpu::kVectorBytes > sizeof(T) ? Cpu::kVectorBytes : sizeof(T);
  using Stored = T;
  using Lane = T;
  using Lanes = Vector<T, kBytes>;
  static constexpr size_t kLanes = kBytes / sizeof(T);
  static constexpr bool kFloating = T(0.5) != T(0);

  static Lanes load(const char* from) {
    Lanes lanes;
    __builtin_memcpy(&lanes, from, sizeof lanes);
    return lanes;
  }
  static void store(char* to, Lanes lanes) { __builtin_memcpy(to, &lanes, sizeof lanes); }
};

// 16-bit floats. They are computed in float32 and rounded once, to nearest even, when they are stored.
template <class Cpu>
struct Float16 {
  using Stored = uint16_t;
  using Lane = float;
  using Lanes = typename Words<Cpu>::Floats;
  static constexpr size_t kLanes = Cpu::kVectorBytes / sizeof(float);
  static constexpr bool kFloating = true;

  static Lanes load(const char* from) {
    typename Words<Cpu>::Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return Cpu::widen(halves);
  }
  static void store(char* to, Lanes lanes) {
    const auto halves = Cpu::narrow(lanes);
    __builtin_memcpy(to, &halves, sizeof halves);
  }
};

template <class Cpu>
struct BFloat16 : Float16<Cpu> {
  using Lanes = typename Words<Cpu>::Floats;
  using Bits = typename Words<Cpu>::Bits;
  using Halves = typename Words<Cpu>::Halves;

  static Lanes load(const char* from) {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return (Lanes)(Cpu::zero_extend(halves) << 16);
  }
  // Makes NaNs canonical first, because rounding could turn the payload of another NaN into infinity.
  static void store(char* to, Lanes lanes) {
    const Bits bits = (Bits)lanes;
    const Halves halves = Cpu::truncate((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    __builtin_memcpy(to, &halves, sizeof halves);
  }
};

// 8-bit floats. They are computed in float32 and rounded once, to nearest even, when they are stored. A number that is
// too large becomes kBeyond, which is infinity, or NaN if the format has no infinity.
template <class Cpu, int kMantissa, int kBeyond>
struct Float8 : Float16<Cpu> {
  using Stored = uint8_t;
  using Lanes = typename Words<Cpu>::Floats;
  using Bits = typename Words<Cpu>::Bits;
  using Halves = typename Words<Cpu>::Halves;
  using Signed = Vector<int32_t, Cpu::kVectorBytes>;
  using Bytes = Vector<uint8_t, Cpu::kVectorBytes / 4>;
  static constexpr int kBias = (1 << (6 - kMantissa)) - 1;
  static constexpr int kDropped = 23 - kMantissa;  // mantissa bits of a float32 that store() drops
  static constexpr int kNaN = kBeyond | 1 << (kMantissa - 1);

  // The shifted bits, read as an IEEE half (whose exponent bias is 15), represent the number divided by a power of two.
  static Lanes load(const char* from) {
    Bytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    const Halves stored = __builtin_convertvector(bytes, Halves);
    const Halves magnitude = stored & 0x7f;
    const Halves halves = (stored & 0x80) << 8 | magnitude << (10 - kMantissa);
    const Lanes lanes = Cpu::widen(halves) * static_cast<float>(1 << (15 - kBias));
    if constexpr (kBeyond != kNaN) return lanes;
    return (Signed)Cpu::zero_extend(magnitude) == kNaN ? Lanes{} + __builtin_nanf("") : lanes;
  }

  static void store(char* to, Lanes lanes) {
    const Signed magnitude = (Signed)lanes & 0x7fffffff;
    // After adding this power of two, the low bits hold the float8 subnormal, correctly rounded.
    const Signed power = Signed{} + ((127 + 1 + kDropped - kBias) << 23);
    const Signed subnormal = (Signed)((Lanes)magnitude + (Lanes)power) - power;
    const Signed odd = (magnitude >> kDropped) & 1;
    const Signed below_half = odd + (1 << (kDropped - 1)) - 1;
    const Signed normal = (magnitude - ((127 - kBias) << 23) + below_half) >> kDropped;
    Signed bits = magnitude < ((128 - kBias) << 23) ? subnormal : normal;
    bits = bits > kBeyond ? Signed{} + kBeyond : bits;
    bits = magnitude > (0xff << 23) ? Signed{} + kNaN : bits;
    const Halves halves = Cpu::truncate((Bits)bits | ((Bits)lanes >> 31 << 7));
    const Bytes bytes = __builtin_convertvector(halves, Bytes);
    __builtin_memcpy(to, &bytes, sizeof bytes);
  }
};

// Booleans, stored as bytes. load() turns any non-zero byte into 1.
template <class Cpu>
struct Boolean : Same<Cpu, uint8_t> {
  using Lanes = Vector<uint8_t, Cpu::kVectorBytes>;
  static Lanes load(const char* from) { return (Lanes)(Same<Cpu, uint8_t>::load(from) != 0) & 1; }
};

}  // namespace farandole::kernels
