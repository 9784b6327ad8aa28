// SPDX-License-Identifier: Apache-2.0
// What one thread block of the move kernel does. Read by the C++ compiler and by NVRTC: no headers here.
#pragma once

namespace farandole::gpu {

enum MoveKind : unsigned char {
  kCopyBytes = 0,  // `elements` bytes from source to target
  kFill = 1,       // `elements` elements of `to`, all with the bits in `pattern`
  kConvert = 2,    // to(source * factor / divisor), element by element
};

struct Chunk {
  unsigned long long source;
  unsigned long long target;
  union {
    double factor;
    unsigned long long pattern;
  };
  unsigned elements;
  unsigned divisor;
  unsigned char kind;  // MoveKind
  unsigned char from;  // DType: real numbers only; complex ones are two of them
  unsigned char to;
  unsigned char unused[5];
};
static_assert(sizeof(Chunk) == 40, "an array of these is uploaded as it is");

}  // namespace farandole::gpu
