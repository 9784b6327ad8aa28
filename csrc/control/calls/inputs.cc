// SPDX-License-Identifier: Apache-2.0
#include "control/calls/inputs.h"

#include <algorithm>
#include <utility>

#include "kernels/kernels.h"

namespace farandole {

void Inputs::begin(int members) {
  if (members_ != members) with_input_ = MemberMask(members);
  members_ = members;
  with_input_.clear();
  count_ = rode_along_ = 0;
  rows_.clear();
}

void Inputs::end() {
  payloads_ = {};
  extents_ = {};
}

bool Inputs::sound(const Signature& s, const Contribution& given, int members) {
  if (!given.has_input) return given.rows == 0 && !given.has_payload && given.splits.empty();
  const CollectiveTraits& traits = s.traits();
  int64_t bytes = static_cast<int64_t>(size_of(s.dtype));
  if (traits.ragged() || given.has_payload) {
    for (size_t i = 0; i < s.shape.size(); ++i) {
      int64_t length = i == 0 && traits.ragged() ? given.rows : s.shape[i];
      if (length < 0 || __builtin_mul_overflow(bytes, length, &bytes)) return false;
    }
  }
  if (given.has_payload) {
    bool rides =
        traits.rides_along && (!traits.reduces() || kernels::supports(s.dtype, s.reduce_op));
    if (!rides || given.payload.size() > kTinyBytes) return false;
    if (!std::cmp_equal(given.payload.size(), bytes)) return false;
  }
  if (!traits.splits()) return true;
  int64_t rows = 0;
  for (int64_t n : given.splits) {
    if (n < 0 || n > given.rows - rows) return false;
    rows += n;
  }
  return std::cmp_equal(given.splits.size(), members);
}

void Inputs::add_rows(int member, const Signature& signature, const Contribution& given) {
  rows_.resize(told_rows(signature));
  if (!given.has_input) return;
  const CollectiveTraits& traits = signature.traits();
  const size_t first =
      traits.first_told(static_cast<size_t>(member), static_cast<size_t>(members_));
  if (traits.splits()) {
    std::ranges::copy(given.splits, rows_.begin() + static_cast<ptrdiff_t>(first));
  } else {
    rows_[first] = given.rows;
  }
}

void Inputs::add_payload(int member, ByteView payload) {
  const auto n = static_cast<size_t>(members_);
  ++rode_along_;
  if (extents_.empty()) payloads_.reserve(n * payload.size());
  extents_.resize(n);
  extents_[static_cast<size_t>(member)] = {static_cast<uint32_t>(payloads_.size()),
                                           static_cast<uint32_t>(payload.size())};
  payloads_.insert(payloads_.end(), payload.begin(), payload.end());
}

void Inputs::add_all(const MemberSlice& members) {
  with_input_.insert_all(members.first_word, members.words, members.count);
  count_ += members.count;
}

ByteView Inputs::payload(int member) const {
  if (extents_.empty()) return {};
  const Extent& extent = extents_[static_cast<size_t>(member)];
  return ByteView(payloads_).subspan(extent.offset, extent.bytes);
}

std::vector<int32_t> Inputs::absent_members() const {
  if (count_ == members_) return {};
  return with_input_.missing();
}

size_t Inputs::bytes(const Signature& s) const {
  if (rows_.empty()) return s.bytes();
  size_t rows = 0;
  for (int64_t n : rows_) rows += static_cast<size_t>(n);
  return rows * s.row_bytes();
}

}  // namespace farandole
