// SPDX-License-Identifier: Apache-2.0
// See nccl_wire.h. Used by NcclSchedule; pure functions, any thread.
#include "data/nccl/nccl_wire.h"

#include "base/error.h"
#include "data/backend/backend.h"

namespace farandole {
namespace {

// Scaled sums of small integers must not wrap before they are divided, and of some types NCCL knows the carrier only.
DType integer_wire(DType type, bool scaled) {
  const DTypeTraits& traits = traits_of(type);
  return scaled || traits.nccl < 0 ? traits.carrier : type;
}

// Average natively; other weights by NCCL where it takes them exactly, else by our kernel in float32.
void weigh_floats(NcclWire& wire, double prescale, int64_t divisor, int members) {
  if (divisor != 1 && divisor == members && prescale == 1.0) {
    wire.op = nccl::kAverage;
  } else if (traits_of(wire.type).carrier == wire.type) {
    wire.weight = prescale / static_cast<double>(divisor);
  } else {
    wire.factor_in = prescale;
    wire.divisor_in = divisor;
  }
}

void scale_floats(NcclWire& wire, const Signature& s, int64_t divisor) {
  if (wire.type == DType::kFloat16) {
    wire.factor_in = s.prescale;
    wire.divisor_in = divisor;
  } else {
    wire.factor_out = s.prescale * s.postscale;
    wire.divisor_out = divisor;
  }
}

}  // namespace

NcclWire wire_of(const Part& part, int members, bool plain_sums) {
  const Signature& s = part.signature;
  const ReduceOpTraits& reduction = traits_of(s.reduce_op);
  const int64_t divisor = factors_of(part).divisor;
  NcclWire wire;
  wire.element = wire.type = traits_of(s.dtype).real;
  const bool is_float = traits_of(wire.element).is_float();
  wire.per_element = size_of(s.dtype) / size_of(wire.element);
  wire.op = reduction.nccl;
  wire.identity = reduction.sums ? ReduceOp::kSum : s.reduce_op;
  wire.factor_out = s.postscale;
  if (is_float && reduction.sums) {
    if (plain_sums) {
      scale_floats(wire, s, divisor);
    } else {
      weigh_floats(wire, s.prescale, divisor, members);
    }
    return wire;
  }
  wire.factor_in = s.prescale;
  wire.divisor_out = divisor;
  const bool scaled = s.prescale != 1.0 || s.postscale != 1.0 || divisor != 1;
  if (!is_float) wire.type = integer_wire(wire.element, scaled);
  return wire;
}

nccl::DataType nccl_type(DType type) {
  const nccl::DataType found = traits_of(type).nccl;
  if (found < 0) throw Error(ErrorCode::kInternal, std::string("NCCL has no ") + name_of(type));
  return found;
}

}  // namespace farandole
