// SPDX-License-Identifier: Apache-2.0
// The words that every room uses: element types, operations, ranks, and what a rank asks for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dimensions.h"

namespace farandole {

using Rank = int32_t;   // of the world, unless a name says otherwise
using SetId = int32_t;  // process set; 0 is the world

constexpr SetId kWorldSet = 0;
constexpr int32_t kCpuDevice = -1;
constexpr int32_t kAnyGpu = 0;  // in a signature: each rank has its own

// Values are part of the C ABI (FARANDOLE_* in farandole.h) and of the wire: append only.
enum class DType : int32_t {
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kComplex64,
  kComplex128,
};
constexpr int32_t kDTypeCount = 15;

enum class ReduceOp : int32_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};
constexpr int32_t kReduceOpCount = 6;

enum class Op : int32_t {
  kAllreduce = 0,
  kBroadcast = 1,
  kAllgather = 2,
  kReducescatter = 3,
  kAlltoall = 4,
  kBarrier = 5,
  kJoin = 6,
  kAddSet = 7,
  kRemoveSet = 8,
};
constexpr int32_t kOpCount = 9;

size_t size_of(DType dtype);
const char* name_of(DType dtype);
const char* name_of(ReduceOp op);
const char* name_of(Op op);
std::string text_of(std::span<const int64_t> shape);        // "(3, 4)"; -1, any length, is "*"
std::string text_of_ranks(const std::vector<Rank>& ranks);  // "ranks 0, 2-5"

// Where a tensor on a GPU is reduced: at one place of memory that NCCL knows, the same on all ranks.
struct Place {
  uint32_t window = 0;  // its number: the set's members opened theirs in one order; 0: nowhere
  uint64_t window_bytes = 0;
  uint64_t offset = 0;  // bytes

  bool operator==(const Place&) const = default;
};
std::string text_of(const Place& place);

// What all ranks must agree about under one name. Travels once per name; then its id stands for it.
// `shape` of allgather and alltoall may differ between ranks in the first dimension: it is -1 here.
struct Signature {
  Op op = Op::kAllreduce;
  ReduceOp reduce_op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;
  int32_t device = kCpuDevice;  // kind only matters for agreement: CPU or GPU
  Rank root = -1;               // world rank; broadcast only
  double prescale = 1.0;
  double postscale = 1.0;
  Dimensions shape;
  int32_t group_size = 1;  // members of the atomic group this request belongs to
  Place place;

  int64_t elements() const;
  size_t bytes() const { return static_cast<size_t>(elements()) * size_of(dtype); }
  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t row_elements() const;  // product of all dimensions but the first
  bool operator==(const Signature&) const = default;
};

}  // namespace farandole
