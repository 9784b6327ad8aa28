// SPDX-License-Identifier: Apache-2.0
// The loops for AArch64, with its half-float conversions. NEON is always available there.
#include <arm_neon.h>

#include "kernels/loops.h"

namespace farandole::kernels {
namespace {

struct Cpu {
  static constexpr int kVectorBytes = 16;
  using Floats = Words<Cpu>::Floats;
  using Bits = Words<Cpu>::Bits;
  using Halves = Words<Cpu>::Halves;

  static Floats widen(Halves halves) { return (Floats)vcvt_f32_f16((float16x4_t)halves); }
  static Halves narrow(Floats value) { return (Halves)vcvt_f16_f32((float32x4_t)value); }
  static Bits zero_extend(Halves halves) { return (Bits)vmovl_u16((uint16x4_t)halves); }
  static Halves truncate(Bits bits) { return (Halves)vmovn_u32((uint32x4_t)bits); }
};

}  // namespace

constinit const Target kNeon = make_target<Cpu>("neon");

}  // namespace farandole::kernels
