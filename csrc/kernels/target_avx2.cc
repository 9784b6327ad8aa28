// SPDX-License-Identifier: Apache-2.0
// The loops for AVX2, with F16C's half-float conversions.
#include <immintrin.h>

#include "kernels/loops.h"

namespace farandole::kernels {
namespace {

struct Cpu {
  static constexpr int kVectorBytes = 32;
  using Floats = Words<Cpu>::Floats;
  using Bits = Words<Cpu>::Bits;
  using Halves = Words<Cpu>::Halves;

  static Floats widen(Halves halves) { return _mm256_cvtph_ps((__m128i)halves); }
  static Halves narrow(Floats value) {
    return (Halves)_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  }
  static Bits zero_extend(Halves halves) { return (Bits)_mm256_cvtepu16_epi32((__m128i)halves); }
  static Halves truncate(Bits bits) {
    const __m256i packed =
        _mm256_packus_epi32((__m256i)bits, (__m256i)bits);  // packs within each 128-bit half
    return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
  }
};

}  // namespace

constinit const Target kAvx2 = make_target<Cpu>("avx2");

}  // namespace farandole::kernels
