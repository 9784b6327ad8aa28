// SPDX-License-Identifier: Apache-2.0
// What one build of the loops offers. Included by files compiled for newer CPUs: no std headers here.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace farandole::kernels {

// result = post * (reduce over q of pre * in[q]) / divisor; the divisor is 1 unless Average.
struct Factors {
  double pre = 1.0;
  double post = 1.0;
  int64_t divisor = 1;
};

using ReduceFn = void (*)(void* out, const void* const* inputs, int n_inputs, size_t count,
                          const Factors& factors);

// Elements to the type that carries their sums, times `pre`; and back, times `post` over the divisor.
using ConvertFn = void (*)(void* out, const void* in, size_t count, const Factors& factors);

// The operations of one element type; an absent operation is a null.
struct Row {
  ReduceFn sum = nullptr;
  ReduceFn min = nullptr;
  ReduceFn max = nullptr;
  ReduceFn product = nullptr;
  ConvertFn widen = nullptr;
  ConvertFn narrow = nullptr;
};

constexpr int kRows = 17;  // DTypes: base/dtype.h has std headers

struct Target {
  const char* name;
  void (*copy_streaming)(void* dst, const void* src, size_t bytes);
  Row rows[kRows];  // by DType
};

extern const Target kBaseline;
extern const Target kAvx2;
extern const Target kAvx512;
extern const Target kNeon;

}  // namespace farandole::kernels
