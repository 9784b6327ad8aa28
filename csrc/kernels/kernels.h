// SPDX-License-Identifier: Apache-2.0
// Reduction of host memory. The loops exist once per instruction set; all give the same bits.
// Any thread may call; pointers need no alignment.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "base/types.h"
#include "kernels/target.h"

namespace farandole::kernels {

// bool: Min, Max, Product; complex: Sum, Average; all else: these five. Adasum is not an elementwise one.
bool supports(DType dtype, ReduceOp op);

// out[i] = post * (pre*in[0][i] op pre*in[1][i] op ...) / divisor, strictly in this order; Average is
// Sum, and the caller gives the divisor. n_inputs >= 1; `out` may be one of the inputs, but may not
// overlap one in part.
//
// Floats: those of fewer than 32 bits accumulate in float32 and round once. A NaN wins, also in Min and Max, and comes
// out as the canonical quiet NaN (a single input without factors is copied as it is).
// Integers: Sum and Product wrap; division truncates. A factor is applied in double, truncates towards
// zero and saturates: each input by `pre`, the result by `post` and the divisor together. With factors
// or a divisor, sums and products of up to 16 bits are carried in 32, of 32 bits in 64.
// Throws kInvalidArgument for what supports() denies, for a divisor outside [1, 2^31), and for bool
// with factors.
void reduce(DType dtype, ReduceOp op, void* out, const void* const* inputs, int n_inputs,
            size_t count, const Factors& factors);

// The same reduction in two steps: partial results of groups of inputs, then the result of the partials.
// They are of partial_dtype: what the sums are carried in, so nothing is rounded or cut off in between.
// Integers, Min and Max come out as in one step; sums and products of floats are associated by group.
DType partial_dtype(DType dtype, ReduceOp op, const Factors& factors);
// `partial` is aligned to its type.
void reduce_to_partial(DType dtype, ReduceOp op, void* partial, const void* const* inputs,
                       int n_inputs, size_t count, const Factors& factors);
void reduce_partials(DType dtype, ReduceOp op, void* out, const void* const* partials,
                     int n_partials, size_t count, const Factors& factors);

// What changes no result: Sum 0, Product 1, Min +inf or the highest, Max -inf or the lowest.
void fill_identity(DType dtype, ReduceOp op, void* out, size_t count);

void copy(void* dst, const void* src, size_t bytes);

// For results larger than the cache: the destination is not read into it. Complete, and visible in
// order to other threads, on return.
void copy_streaming(void* dst, const void* src, size_t bytes);

// Called once at init, with FARANDOLE_CPU_TARGET or "" for the best. Throws kInvalidArgument for a name
// that this CPU cannot run.
void select_target(std::string_view name);
const char* target();
std::vector<const char*> targets_available();

// As reduce, on a target of targets_available().
void reduce_on(std::string_view target, DType dtype, ReduceOp op, void* out,
               const void* const* inputs, int n_inputs, size_t count, const Factors& factors);

}  // namespace farandole::kernels
