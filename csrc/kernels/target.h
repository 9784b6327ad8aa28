// SPDX-License-Identifier: Apache-2.0
// The interface of one build of the loops. Files for newer CPUs include it, so it uses no std headers.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace farandole::kernels {

// result = post * (reduce over q of pre * in[q]) / divisor; the divisor is 1 except for Average.
struct Factors {
  double pre = 1.0;
  double post = 1.0;
  int64_t divisor = 1;
};

using ReduceFn = void (*)(void* out, const void* const* inputs, int n_inputs, size_t count,
                          const Factors& factors);

// Converts elements to the type that carries sums, times `pre`; or back, times `post` / divisor.
using ConvertFn = void (*)(void* out, const void* in, size_t count, const Factors& factors);

// Loops of one element type; nullptr: the op is not supported.
struct Row {
  ReduceFn sum = nullptr;
  ReduceFn min = nullptr;
  ReduceFn max = nullptr;
  ReduceFn product = nullptr;
  ConvertFn widen = nullptr;
  ConvertFn narrow = nullptr;
};

constexpr int kRows = 17;  // number of DTypes; base/dtype.h has std headers

struct Target {
  const char* name;
  Row rows[kRows];  // by DType
};

extern const Target kBaseline;
extern const Target kAvx2;
extern const Target kAvx512;
extern const Target kNeon;

}  // namespace farandole::kernels
