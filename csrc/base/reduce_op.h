// SPDX-License-Identifier: Apache-2.0
// The reduce ops, which are ways to combine inputs into one result, with a row of traits for each.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/abi.h"
#include "base/dtype.h"

namespace farandole {

// These values are part of the C ABI (farandole.h) and of messages between ranks, so only append to them.
enum class ReduceOp : int32_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};

struct ReduceOpTraits {
  const char* name;
  bool sums = false;
  bool declared = false;  // the core only compares the op between ranks; Python computes the result
  bool divides = false;   // the sum is divided by the number of members
  uint64_t DTypeTraits::* identity = nullptr;  // the neutral element; null means zero
  int nccl = 0;                                // ncclRedOp_t for the element-wise step
};

inline constexpr std::array<ReduceOpTraits, 6> kReduceOps = {{
    {.name = "Average", .sums = true, .divides = true},
    {.name = "Sum", .sums = true},
    {.name = "Adasum", .declared = true},
    {.name = "Min", .identity = &DTypeTraits::highest, .nccl = 3},
    {.name = "Max", .identity = &DTypeTraits::lowest, .nccl = 2},
    {.name = "Product", .identity = &DTypeTraits::one, .nccl = 1},
}};
inline constexpr int32_t kReduceOpCount = kReduceOps.size();
static_assert(FARANDOLE_PRODUCT == kReduceOpCount - 1 &&
                  static_cast<int32_t>(ReduceOp::kProduct) == FARANDOLE_PRODUCT,
              "one row for each value of the header's enum, in its order");

constexpr const ReduceOpTraits& traits_of(ReduceOp op) {
  return kReduceOps.at(static_cast<size_t>(op));
}
constexpr const char* name_of(ReduceOp op) { return traits_of(op).name; }

// Returns the divisor of a reduction. Members that have joined also count, as in Horovod.
constexpr int64_t divisor_of(ReduceOp op, int members) {
  return traits_of(op).divides ? members : 1;
}

}  // namespace farandole
