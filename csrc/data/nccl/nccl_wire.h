// SPDX-License-Identifier: Apache-2.0
// How a reduction looks to NCCL: which type it adds, which operator, and what our kernel does before and
// after. Integers keep the shared-memory backend's rules (small ones are added in wider ones, divisions truncate).
#pragma once

#include "base/types.h"
#include "data/backend/backend.h"
#include "lib/gpu/nccl.h"

namespace farandole {

struct NcclWire {
  DType element;  // the part's own real type: a complex number is two of them, a bool a uint8
  size_t per_element = 1;  // real numbers in one element
  DType type;              // what NCCL adds
  nccl::RedOp op = nccl::kSum;
  ReduceOp identity = ReduceOp::kSum;  // whose identity a member without input brings
  double weight = 1.0;  // not 1: a sum of weight * input, not op; float32, float64 only
  // target = source * factor / divisor, before and after
  double factor_in = 1.0, factor_out = 1.0;
  int64_t divisor_in = 1, divisor_out = 1;

  bool converts_in() const { return type != element || factor_in != 1.0 || divisor_in != 1; }
  bool converts_out() const { return type != element || factor_out != 1.0 || divisor_out != 1; }
  // Calls that may share one packed buffer.
  bool same_call(const NcclWire& other) const {
    return type == other.type && op == other.op && weight == other.weight &&
           identity == other.identity;
  }
};

// Of an allreduce or a reducescatter. `plain_sums`: a sum of floats has no weight, and our kernel scales it afterwards,
// because NCCL's symmetric kernels, which reduce windows in place (2.28.9 src/sym_kernels.cc:269), and the adders of a switch
// take no weighted sums. One division also rounds less than a factor for each input. float16 would overflow: our kernel
// scales it first.
NcclWire wire_of(const Part& part, int members, bool plain_sums);

nccl::DataType nccl_type(DType type);  // of a NcclWire's type

}  // namespace farandole
