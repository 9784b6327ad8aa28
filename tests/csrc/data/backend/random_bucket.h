// SPDX-License-Identifier: Apache-2.0
// Random buckets: mixed operations, dtypes and sizes, absent members, dropped outputs, some in place.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "data/backend/bucket.h"
#include "kernels/kernels.h"

namespace farandole::check {

inline bool one_in(Random& random, size_t chances) { return random.below(chances) == 0; }

inline ReduceOp random_reduce_op(Random& random, DType dtype) {
  constexpr ReduceOp kOps[] = {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                               ReduceOp::kProduct};
  for (;;) {
    const ReduceOp op = kOps[random.below(5)];
    if (kernels::supports(dtype, op)) return op;
  }
}

inline void choose_rows(Random& random, PartSpec& spec, int members) {
  const Op op = spec.part.signature.op;
  const auto n = static_cast<size_t>(members);
  const auto total = spec.part.signature.rows();
  std::vector<int64_t>& rows = spec.part.rows;
  if (op == Op::kReducescatter) {
    for (int m = 0; m < members; ++m) rows.push_back(kept_rows(total, m, members));
  } else if (traits_of(op).ragged()) {
    rows.resize(op == Op::kAlltoall ? n * n : n);
    for (size_t i = 0; i < rows.size(); ++i) {
      const bool present = spec.part.has(static_cast<int>(op == Op::kAlltoall ? i / n : i));
      rows[i] = present ? static_cast<int64_t>(random.below(static_cast<size_t>(total) + 1)) : 0;
    }
    spec.part.signature.shape[0] = -1;
  }
}

inline PartSpec random_part(Random& random, Op op, DType dtype, std::vector<int64_t> shape,
                            int members) {
  PartSpec spec;
  Signature& signature = spec.part.signature;
  signature.op = op;
  signature.dtype = dtype;
  signature.shape = std::move(shape);
  const bool reduces = traits_of(op).reduces();
  if (reduces) signature.reduce_op = random_reduce_op(random, dtype);
  if (reduces && dtype != DType::kBool && one_in(random, 4)) {
    signature.prescale = 0.5;
    signature.postscale = 1.5;
  }
  const auto n = static_cast<size_t>(members);
  const bool rooted = traits_of(op).rooted();
  if (rooted) signature.root = static_cast<Rank>(random.below(n));
  if (!traits_of(op).from_root() && one_in(random, 4)) {
    spec.part.present.assign(n, true);
    const size_t stays = rooted ? static_cast<size_t>(signature.root) : random.below(n);
    for (size_t m = 0; m < n; ++m) spec.part.present[m] = m == stays || !one_in(random, 3);
  }
  if (signature.reduce_op == ReduceOp::kAverage) spec.part.divisor = members;
  choose_rows(random, spec, members);
  spec.seed = random.next();
  spec.in_place = one_in(random, 2);
  if (one_in(random, 5)) {
    spec.drops_output.resize(n);
    for (size_t m = 0; m < n; ++m) spec.drops_output[m] = one_in(random, 2);
  }
  return spec;
}

// Buckets of one tensor each, shapes without elements among them.
inline std::vector<BucketSpec> buckets_of_every_kind(Random& random, int members) {
  const std::vector<std::vector<int64_t>> shapes = {{0},    {1},    {7},    {65},
                                                    {3, 5}, {0, 4}, {4, 0}, {1000}};
  std::vector<BucketSpec> buckets;
  for (Op op : {Op::kAllreduce, Op::kBroadcast, Op::kAllgather, Op::kReducescatter, Op::kAlltoall,
                Op::kScatter, Op::kReduce}) {
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
      for (const auto& shape : shapes) {
        buckets.push_back({random_part(random, op, static_cast<DType>(dtype), shape, members)});
      }
    }
  }
  return buckets;
}

// At most `most_parts` tensors of any kind; now and then one of most_elements, else small ones.
inline BucketSpec random_bucket(Random& random, int members, size_t most_parts,
                                size_t most_elements) {
  constexpr Op kOps[] = {Op::kAllreduce, Op::kAllreduce, Op::kAllreduce,     Op::kAllreduce,
                         Op::kBroadcast, Op::kAllgather, Op::kReducescatter, Op::kAlltoall,
                         Op::kScatter,   Op::kReduce,    Op::kReduce};
  BucketSpec bucket(1 + random.below(most_parts));
  Op op = kOps[random.below(std::size(kOps))];
  for (PartSpec& spec : bucket) {
    if (one_in(random, 4)) op = kOps[random.below(std::size(kOps))];
    const auto dtype = static_cast<DType>(random.below(kDTypeCount));
    const size_t limit = one_in(random, 4) ? most_elements : std::min<size_t>(most_elements, 64);
    auto rows = static_cast<int64_t>(random.below(limit + 1));
    std::vector<int64_t> shape = {rows};
    if (one_in(random, 2)) shape = {rows / 3, 3};
    spec = random_part(random, op, dtype, shape, members);
  }
  return bucket;
}

inline std::vector<BucketSpec> random_buckets(Random& random, int members, size_t count,
                                              size_t most_parts, size_t most_elements) {
  std::vector<BucketSpec> buckets;
  for (size_t i = 0; i < count; ++i) {
    buckets.push_back(random_bucket(random, members, most_parts, most_elements));
  }
  return buckets;
}

// More than fit in one block, of every dtype.
inline BucketSpec tiny_tensors(Random& random, int members) {
  BucketSpec bucket;
  for (int i = 0; i < 1500; ++i) {
    const auto dtype = static_cast<DType>(i / 50 % kDTypeCount);
    bucket.push_back(random_part(random, Op::kAllreduce, dtype, {i % 11}, members));
  }
  return bucket;
}

// Without factors, and with equal shares.
inline PartSpec plain(Op op, int64_t elements, int members, DType dtype = DType::kFloat32) {
  PartSpec spec;
  Signature& signature = spec.part.signature;
  signature.op = op;
  signature.dtype = dtype;
  signature.shape = {elements};
  const auto n = static_cast<size_t>(members);
  if (traits_of(op).rooted()) signature.root = 1 % members;
  if (op == Op::kAllgather) spec.part.rows.assign(n, elements);
  if (op == Op::kAlltoall) spec.part.rows.assign(n * n, elements);
  if (op == Op::kReducescatter || op == Op::kScatter) spec.part.rows.assign(n, elements / members);
  spec.seed = static_cast<uint64_t>(elements) * 7919 + 1;
  return spec;
}

}  // namespace farandole::check
