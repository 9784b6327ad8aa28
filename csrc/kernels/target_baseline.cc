// SPDX-License-Identifier: Apache-2.0
// What every CPU of the architecture can run, without any intrinsic.
#include "kernels/loops.h"

namespace farandole::kernels {
namespace {

struct Width {
  static constexpr int kVectorBytes = 16;
};

struct Cpu : Width, PortableHalves<Width> {
  static void copy_streaming(void* dst, const void* src, size_t bytes) {
    __builtin_memcpy(dst, src, bytes);
  }
};

}  // namespace

constinit const Target kBaseline = make_target<Cpu>("baseline");

}  // namespace farandole::kernels
