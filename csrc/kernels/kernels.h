// SPDX-License-Identifier: Apache-2.0
// Reduces arrays in host memory. The result has the same bits on every instruction set. These functions may be called
// from any thread. Pointers need not be aligned.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "base/types.h"
#include "kernels/target.h"

namespace farandole::kernels {

// Returns true for Min, Max and Product of bool, for Sum and Average of complex types, and for all ops except Adasum
// for other dtypes. Adasum is never supported, because it is not element-wise.
bool supports(DType dtype, ReduceOp op);

// out[i] = post * (pre*in[0][i] op pre*in[1][i] op ...) / divisor, evaluated strictly in this order. Average is Sum
// with the caller's divisor. n_inputs must be at least 1. `out` may be the same array as one of the inputs, but must
// not partly overlap any.
//
// Floats of fewer than 32 bits are accumulated in float32 and rounded once. If an input is NaN, the result is the
// canonical quiet NaN, also for Min and Max. The only exception is a single input without factors, which is copied.
// Sum and Product of integers wrap, and their division truncates. Factors are applied in double: `pre` to each input,
// and `post` / divisor to the result. Each of these products is truncated towards zero and limited to the type's range.
// If there are factors or a divisor, integers of up to 16 bits are accumulated in 32 bits, and 32-bit integers in 64
// bits.
// Throws Error(kInvalidArgument) if supports() is false, if the divisor is outside [1, 2^31), or if bool has factors.
void reduce(DType dtype, ReduceOp op, void* out, const void* const* inputs, int n_inputs,
            size_t count, const Factors& factors);

// These functions do the same reduction in two steps: first each group of inputs to a partial, then all partials to the
// result. Partials have the accumulator type, partial_dtype(), so they are not rounded to `dtype`. For integers, Min
// and Max, the result has the same bits as a reduction in one step. Sums and products of floats may differ, because
// each group is combined first.
DType partial_dtype(DType dtype, ReduceOp op, const Factors& factors);
// `partial` must be aligned to its type.
void reduce_to_partial(DType dtype, ReduceOp op, void* partial, const void* const* inputs,
                       int n_inputs, size_t count, const Factors& factors);
void reduce_partials(DType dtype, ReduceOp op, void* out, const void* const* partials,
                     int n_partials, size_t count, const Factors& factors);

// Fills `out` with the neutral element: 0 for Sum, 1 for Product, +inf or the highest value for Min, and -inf or the
// lowest value for Max.
void fill_identity(DType dtype, ReduceOp op, void* out, size_t count);

void copy(void* dst, const void* src, size_t bytes);

// Returns the index of the first element that is NaN or infinite, or `elements` if there is none. A complex element
// counts if either part is NaN or infinite.
size_t first_not_finite(DType dtype, const void* data, size_t elements);

// Selects a target. The default is "", which stands for the best target for this CPU. Throws Error(kInvalidArgument) if
// the CPU does not support the target.
void select_target(std::string_view name);
const char* target();
std::vector<const char*> targets_available();

}  // namespace farandole::kernels
