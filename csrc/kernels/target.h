// SPDX-License-Identifier: Apache-2.0
// A target: the reduction loops compiled for one instruction set. Do not include std headers here (see codec.h).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace farandole::kernels {

// The result is post * (reduction of pre * in[q] over all q) / divisor. The divisor is 1 for all ops except Average.
struct Factors {
  double pre = 1.0;
  double post = 1.0;
  int64_t divisor = 1;
};

using ReduceFn = void (*)(void* out, const void* const* inputs, int n_inputs, size_t count,
                          const Factors& factors);

// Row::widen converts elements to the accumulator type and multiplies them by `pre`. Row::narrow multiplies by `post`,
// divides by the divisor, and converts back to the element type.
using ConvertFn = void (*)(void* out, const void* in, size_t count, const Factors& factors);

// The loops for one element type. A pointer is null if the op is not supported.
struct Row {
  ReduceFn sum = nullptr;
  ReduceFn min = nullptr;
  ReduceFn max = nullptr;
  ReduceFn product = nullptr;
  ConvertFn widen = nullptr;
  ConvertFn narrow = nullptr;
};

constexpr int kRows = 17;  // kDTypeCount of base/dtype.h, which includes std headers

struct Target {
  const char* name;
  Row rows[kRows];  // by DType
};

extern const Target kBaseline;
extern const Target kAvx2;
extern const Target kAvx512;
extern const Target kNeon;

}  // namespace farandole::kernels
