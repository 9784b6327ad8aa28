// SPDX-License-Identifier: Apache-2.0
#include "data/nccl/nccl_wire.h"

#include "base/error.h"

namespace farandole {
namespace {

bool is_float(DType type) {
  return type == DType::kFloat16 || type == DType::kBFloat16 || type == DType::kFloat32 ||
         type == DType::kFloat64;
}

DType real_type(DType type) {
  switch (type) {
    case DType::kBool: return DType::kUInt8;
    case DType::kComplex64: return DType::kFloat32;
    case DType::kComplex128: return DType::kFloat64;
    default: return type;
  }
}

// NCCL has no 16-bit integers; scaled sums of small ones must not wrap before they are divided.
DType integer_wire(DType type, bool scaled) {
  switch (type) {
    case DType::kUInt8:
    case DType::kInt8: return scaled ? DType::kInt32 : type;
    case DType::kUInt16:
    case DType::kInt16: return DType::kInt32;
    case DType::kUInt32: return scaled ? DType::kUInt64 : type;
    case DType::kInt32: return scaled ? DType::kInt64 : type;
    default: return type;
  }
}

nccl::RedOp red_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin: return nccl::kMin;
    case ReduceOp::kMax: return nccl::kMax;
    case ReduceOp::kProduct: return nccl::kProduct;
    default: return nccl::kSum;
  }
}

// Average natively; other weights by NCCL where it takes them exactly, else by our kernel in float32.
void weigh_floats(NcclWire& wire, double prescale, int64_t divisor, int members) {
  if (divisor != 1 && divisor == members && prescale == 1.0) {
    wire.op = nccl::kAverage;
  } else if (wire.type == DType::kFloat32 || wire.type == DType::kFloat64) {
    wire.weight = prescale / static_cast<double>(divisor);
  } else {
    wire.factor_in = prescale;
    wire.divisor_in = divisor;
  }
}

}  // namespace

NcclWire wire_of(const Part& part, int members) {
  const Signature& s = part.signature;
  const bool sums = s.reduce_op == ReduceOp::kSum || s.reduce_op == ReduceOp::kAverage;
  const int64_t divisor = s.reduce_op == ReduceOp::kAverage ? part.divisor : 1;
  NcclWire wire;
  wire.element = wire.type = real_type(s.dtype);
  wire.per_element = size_of(s.dtype) / size_of(wire.element);
  wire.op = red_op(s.reduce_op);
  wire.identity = sums ? ReduceOp::kSum : s.reduce_op;
  wire.factor_out = s.postscale;
  if (is_float(wire.element) && sums) {
    weigh_floats(wire, s.prescale, divisor, members);
    return wire;
  }
  wire.factor_in = s.prescale;
  wire.divisor_out = divisor;
  const bool scaled = s.prescale != 1.0 || s.postscale != 1.0 || divisor != 1;
  if (!is_float(wire.element)) wire.type = integer_wire(wire.element, scaled);
  return wire;
}

nccl::DataType nccl_type(DType type) {
  switch (type) {
    case DType::kUInt8: return nccl::kUInt8;
    case DType::kInt8: return nccl::kInt8;
    case DType::kUInt32: return nccl::kUInt32;
    case DType::kInt32: return nccl::kInt32;
    case DType::kUInt64: return nccl::kUInt64;
    case DType::kInt64: return nccl::kInt64;
    case DType::kFloat16: return nccl::kFloat16;
    case DType::kBFloat16: return nccl::kBFloat16;
    case DType::kFloat32: return nccl::kFloat32;
    case DType::kFloat64: return nccl::kFloat64;
    default: throw Error(ErrorCode::kInternal, std::string("NCCL has no ") + name_of(type));
  }
}

}  // namespace farandole
