// SPDX-License-Identifier: Apache-2.0
// Reduces arrays in host memory, with the same bits on every instruction set. Any thread. Pointers need no alignment.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "base/types.h"
#include "kernels/target.h"

namespace farandole::kernels {

// bool: Min, Max, Product. Complex: Sum, Average. Other dtypes: all of these. Adasum: none, as it is not element-wise.
bool supports(DType dtype, ReduceOp op);

// out[i] = post * (pre*in[0][i] op pre*in[1][i] op ...) / divisor, strictly in this order. Average is Sum with the
// caller's divisor. n_inputs >= 1. `out` may be one of the inputs, but must not partly overlap any.
//
// Floats of fewer than 32 bits accumulate in float32 and round once. If an input is NaN, the result is the canonical
// quiet NaN, also in Min and Max (but a single input without factors is copied).
// Integers: Sum and Product wrap; division truncates. Factors apply in double: `pre` to each input, `post` / divisor to
// the result. Each of these products is truncated towards zero and limited to the type's range. With factors or a
// divisor, integers of up to 16 bits accumulate in 32 bits, those of 32 bits in 64.
// Throws Error(kInvalidArgument) if supports() is false, for a divisor outside [1, 2^31), and for bool with factors.
void reduce(DType dtype, ReduceOp op, void* out, const void* const* inputs, int n_inputs,
            size_t count, const Factors& factors);

// The same reduction in two steps: first each group of inputs to a partial, then all partials to the result. Partials
// have the accumulator type, partial_dtype(), so they are not rounded to `dtype`. Integers, Min and Max give the same
// bits as in one step; sums and products of floats may differ, because each group is combined first.
DType partial_dtype(DType dtype, ReduceOp op, const Factors& factors);
// `partial` must be aligned to its type.
void reduce_to_partial(DType dtype, ReduceOp op, void* partial, const void* const* inputs,
                       int n_inputs, size_t count, const Factors& factors);
void reduce_partials(DType dtype, ReduceOp op, void* out, const void* const* partials,
                     int n_partials, size_t count, const Factors& factors);

// Fills `out` with the neutral element: Sum 0, Product 1, Min +inf or the highest value, Max -inf or the lowest value.
void fill_identity(DType dtype, ReduceOp op, void* out, size_t count);

void copy(void* dst, const void* src, size_t bytes);

// Returns the index of the first element that is NaN or infinite (complex: either part), or `elements` if none is.
size_t first_not_finite(DType dtype, const void* data, size_t elements);

// Selects a target; "" is the best for this CPU, and the default. Throws Error(kInvalidArgument) if the CPU lacks it.
void select_target(std::string_view name);
const char* target();
std::vector<const char*> targets_available();

}  // namespace farandole::kernels
