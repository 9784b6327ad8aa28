// SPDX-License-Identifier: Apache-2.0
// Types that the whole core uses: ranks, ids of process sets, and the signature of a request.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "base/collective.h"
#include "base/dtype.h"
#include "base/reduce_op.h"

namespace farandole {

// Lengths of a tensor's dimensions. Each call copies them often, so up to 5 are stored without allocating memory.
class Dimensions {
 public:
  Dimensions() = default;
  Dimensions(std::initializer_list<int64_t> lengths)
      : Dimensions(std::span(lengths.begin(), lengths.size())) {}
  Dimensions(const std::vector<int64_t>& lengths) : Dimensions(std::span(lengths)) {}
  explicit Dimensions(std::span<const int64_t> lengths) : size_(lengths.size()) {
    if (size_ > kFew) many_.resize(size_);
    std::ranges::copy(lengths, begin());
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t* data() { return size_ > kFew ? many_.data() : few_.data(); }
  const int64_t* data() const { return size_ > kFew ? many_.data() : few_.data(); }
  int64_t* begin() { return data(); }
  int64_t* end() { return data() + size_; }
  const int64_t* begin() const { return data(); }
  const int64_t* end() const { return data() + size_; }
  int64_t& operator[](size_t i) { return data()[i]; }
  const int64_t& operator[](size_t i) const { return data()[i]; }
  bool operator==(const Dimensions& other) const { return std::ranges::equal(*this, other); }

 private:
  static constexpr size_t kFew = 5;
  size_t size_ = 0;
  std::array<int64_t, kFew> few_{};
  std::vector<int64_t> many_;  // replaces few_ if there are more than kFew dimensions
};

using Rank = int32_t;   // rank in the world, unless a name says otherwise
using SetId = int32_t;  // process set; 0 is the world

constexpr SetId kWorldSet = 0;
// A negative id belongs to a pair: a set of two ranks, created by their first message. Users never see pairs.
constexpr bool is_pair(SetId set) { return set < kWorldSet; }
constexpr Rank kAnyRank = -1;
constexpr int32_t kCpuDevice = -1;
constexpr int32_t kAnyGpu = 0;  // in a signature, stands for any GPU: each rank uses its own

std::string text_of(std::span<const int64_t> shape);        // "(3, 4)"; -1 (any length) becomes "*"
std::string text_of_ranks(const std::vector<Rank>& ranks);  // "ranks 0, 2-5"

constexpr size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

std::vector<int> numbers_below(int count);                 // 0, 1, ... count - 1
int index_in(std::span<const Rank> ascending, Rank rank);  // -1 if it is not found

// The parameters of a call on which all ranks must agree. A rank reports the parameters once per name, and later only
// the id of that name. If the first dimension may differ between ranks (CollectiveTraits::ragged), it is -1 here.
struct Signature {
  Op op = Op::kAllreduce;
  ReduceOp reduce_op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;
  int32_t device = kCpuDevice;  // kCpuDevice or kAnyGpu
  Rank root = -1;               // world rank or set id, see CollectiveTraits::root; -1: none
  double prescale = 1.0;
  double postscale = 1.0;
  Dimensions shape;

  const CollectiveTraits& traits() const { return traits_of(op); }
  int64_t elements() const;
  size_t bytes() const { return static_cast<size_t>(elements()) * size_of(dtype); }
  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t row_elements() const;  // product of all dimensions but the first
  size_t row_bytes() const { return static_cast<size_t>(row_elements()) * size_of(dtype); }
  // The only rank that gets a result, or -1 if every rank gets one.
  Rank target() const { return traits().to_root() ? root : -1; }
  bool operator==(const Signature&) const = default;
};

inline bool brings_input(const Signature& signature, Rank rank) {
  return !signature.traits().from_root() || signature.root == rank;
}
inline bool gets_result(const Signature& signature, Rank rank) {
  return signature.target() < 0 || signature.target() == rank;
}

}  // namespace farandole
