// SPDX-License-Identifier: Apache-2.0
// The loops for AVX-512 (F, BW, VL and DQ).
#include <immintrin.h>

#include "kernels/loops.h"

namespace farandole::kernels {
namespace {

struct Cpu {
  static constexpr int kVectorBytes = 64;
  using Floats = Words<Cpu>::Floats;
  using Bits = Words<Cpu>::Bits;
  using Halves = Words<Cpu>::Halves;

  // Uses zero-masking intrinsics, because gcc 12 warns that the plain intrinsics read an uninitialised vector.
  static Floats widen(Halves halves) { return _mm512_maskz_cvtph_ps(0xffff, (__m256i)halves); }
  static Halves narrow(Floats value) {
    return (Halves)_mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT);
  }
  static Bits zero_extend(Halves halves) {
    return (Bits)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)halves);
  }
  static Halves truncate(Bits bits) {
    return (Halves)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)bits);
  }
};

}  // namespace

constinit const Target kAvx512 = make_target<Cpu>("avx512");

}  // namespace farandole::kernels
