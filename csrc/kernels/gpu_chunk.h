// SPDX-License-Identifier: Apache-2.0
// The arguments of the GPU kernel. Both the C++ compiler and NVRTC compile this file, so it includes no other file.
#pragma once

namespace farandole::gpu {

enum MoveKind : unsigned char {
  kCopyBytes = 0,  // copies `elements` bytes from source to target
  kFill = 1,  // fills the target with `elements` elements of type `to`, whose bits are in `pattern`
  kConvert = 2,  // to(source * factor / divisor) for each element
};

struct MoveChunk {
  unsigned long long source;
  unsigned long long target;
  union {
    double factor;
    unsigned long long pattern;
  };
  unsigned elements;
  unsigned divisor;
  unsigned char kind;  // a MoveKind
  unsigned char from;  // a DType of real numbers; a complex number counts as two elements
  unsigned char to;
  unsigned char unused[5];
};
static_assert(sizeof(MoveChunk) == 40, "an array of these is uploaded as it is");

}  // namespace farandole::gpu
