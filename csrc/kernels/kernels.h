// SPDX-License-Identifier: Apache-2.0
// Reductions of host memory, with equal bits on every instruction set. Any thread; pointers need no alignment.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "base/types.h"
#include "kernels/target.h"

namespace farandole::kernels {

// bool: Min, Max, Product; complex: Sum, Average; other dtypes: these five. Adasum is not element-wise.
bool supports(DType dtype, ReduceOp op);

// out[i] = post * (pre*in[0][i] op pre*in[1][i] op ...) / divisor, strictly in this order. Average is Sum with the
// caller's divisor. n_inputs >= 1. `out` may be one of the inputs, but must not overlap one partly.
//
// Floats below 32 bits accumulate in float32 and round once. A NaN wins, also in Min and Max, and becomes the canonical
// quiet NaN (but a single input without factors is copied).
// Integers: Sum and Product wrap; division truncates. Factors are applied in double, truncate towards zero and
// saturate: `pre` to each input, `post` and the divisor together to the result. With factors or a divisor, sums and
// products of up to 16 bits are carried in 32 bits, those of 32 bits in 64.
// Throws kInvalidArgument if supports() is false, for a divisor outside [1, 2^31), and for bool with factors.
void reduce(DType dtype, ReduceOp op, void* out, const void* const* inputs, int n_inputs,
            size_t count, const Factors& factors);

// The same reduction in two steps: partial results of groups of inputs, then their result. Partials have
// partial_dtype(), the type that carries sums, so nothing is rounded or cut in between. Integers, Min and Max give the
// same bits as in one step; sums and products of floats are associated by group.
DType partial_dtype(DType dtype, ReduceOp op, const Factors& factors);
// `partial` must be aligned to its type.
void reduce_to_partial(DType dtype, ReduceOp op, void* partial, const void* const* inputs,
                       int n_inputs, size_t count, const Factors& factors);
void reduce_partials(DType dtype, ReduceOp op, void* out, const void* const* partials,
                     int n_partials, size_t count, const Factors& factors);

// Fills with the identity: Sum 0, Product 1, Min +inf or the highest, Max -inf or the lowest.
void fill_identity(DType dtype, ReduceOp op, void* out, size_t count);

void copy(void* dst, const void* src, size_t bytes);

// Index of the first element that is NaN or infinite (complex: either part), or `elements`. Runs at about memory speed.
size_t first_not_finite(DType dtype, const void* data, size_t elements);

// Call once, at init, with FARANDOLE_CPU_TARGET, or "" for the best. Throws kInvalidArgument if this CPU cannot run it.
void select_target(std::string_view name);
const char* target();
std::vector<const char*> targets_available();

}  // namespace farandole::kernels
