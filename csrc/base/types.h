// SPDX-License-Identifier: Apache-2.0
// The words that every room uses: element types, operations, ranks, and what a rank asks for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/collective.h"
#include "base/dimensions.h"
#include "base/dtype.h"
#include "base/reduce_op.h"

namespace farandole {

using Rank = int32_t;   // of the world, unless a name says otherwise
using SetId = int32_t;  // process set; 0 is the world

constexpr SetId kWorldSet = 0;
constexpr int32_t kCpuDevice = -1;
constexpr int32_t kAnyGpu = 0;  // in a signature: each rank has its own

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
// Where ranks may differ in the first dimension (CollectiveTraits::ragged), it is -1 here.
struct Signature {
  Op op = Op::kAllreduce;
  ReduceOp reduce_op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;
  int32_t device = kCpuDevice;  // kind only matters for agreement: CPU or GPU
  Rank root = -1;               // world rank, or a set, as CollectiveTraits::root says; else -1
  double prescale = 1.0;
  double postscale = 1.0;
  Dimensions shape;
  int32_t group_size = 1;  // members of the atomic group this request belongs to
  Place place;

  const CollectiveTraits& traits() const { return traits_of(op); }
  int64_t elements() const;
  size_t bytes() const { return static_cast<size_t>(elements()) * size_of(dtype); }
  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t row_elements() const;  // product of all dimensions but the first
  size_t row_bytes() const { return static_cast<size_t>(row_elements()) * size_of(dtype); }
  bool operator==(const Signature&) const = default;
};

// Whether a rank's buffer counts as an input: where there is a root, only its own does.
inline bool brings_input(const Signature& signature, Rank rank) {
  return !signature.traits().rooted() || signature.root == rank;
}

}  // namespace farandole
