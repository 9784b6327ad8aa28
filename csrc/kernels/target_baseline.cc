// SPDX-License-Identifier: Apache-2.0
// The loops for any CPU of the architecture, written without intrinsics.
#include "kernels/loops.h"

namespace farandole::kernels {
namespace {

struct Width {
  static constexpr int kVectorBytes = 16;
};

struct Cpu : Width, PortableHalves<Width> {};

}  // namespace

constinit const Target kBaseline = make_target<Cpu>("baseline");

}  // namespace farandole::kernels
