// SPDX-License-Identifier: Apache-2.0
// The lengths of a tensor's dimensions: a vector that allocates only above 5 dimensions, because every call
// copies it several times.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

namespace farandole {

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
  std::vector<int64_t> many_;  // used instead of few_ above kFew dimensions
};

}  // namespace farandole
