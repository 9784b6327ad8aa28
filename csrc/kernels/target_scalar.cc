// SPDX-License-Identifier: Apache-2.0
// The loops for one number at a time: slow, and on other units of the CPU than all others use. They check results.
#include "kernels/loops.h"

namespace farandole::kernels {
namespace {

struct Width {
  static constexpr int kVectorBytes = 4;
};

struct Cpu : Width, PortableHalves<Width> {};

}  // namespace

constinit const Target kScalar = make_target<Cpu>("scalar");

}  // namespace farandole::kernels
