// SPDX-License-Identifier: Apache-2.0
// Tracks host memory that this rank's unfinished calls read and write. Part of RankCalls, whose mutex the caller holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/calls/tables.h"

namespace farandole {

// Sizes in bytes of one tensor's buffers, as far as they are known at submission. If the size of a result becomes known
// only in the negotiation, `output` is the smallest possible size.
struct BufferSizes {
  size_t input;
  size_t output;
};
// Throws an error that says that the call `by` uses the memory. `title` is a prefix that names the refused call.
[[noreturn]] void refuse_in_use(const std::string& title, const std::optional<CallKey>& by);

// The memory of an array's elements. They lie at `begin` plus multiples of the dimensions' steps, in bytes.
class Elements {
 public:
  // Strides may be negative or zero.
  Elements(uintptr_t address, size_t size, std::span<const int64_t> shape,
           std::span<const int64_t> strides);
  Elements(uintptr_t begin, size_t size) : begin_(begin), size_(size), end_(begin + size) {}
  uintptr_t begin() const { return begin_; }
  uintptr_t end() const { return end_; }
  bool empty() const { return begin_ == end_; }
  // True if any byte of an element is in [begin, end).
  bool meet(uintptr_t begin, uintptr_t end) const { return meet(begin_, 0, begin, end); }

 private:
  struct Dimension {
    uintptr_t step;
    uintptr_t count;
    uintptr_t extent;  // bytes spanned by the elements of one index
  };
  bool meet(uintptr_t own, size_t depth, uintptr_t begin, uintptr_t end) const;

  uintptr_t begin_;
  size_t size_;
  uintptr_t end_;
  std::vector<Dimension> dimensions_;  // largest step first
};

BufferSizes sizes_of(const Signature& signature, const Submission& mine, const ProcessSet& set);

// Finds conflicts between calls. While an unfinished call writes to memory, no other call may use it; otherwise the
// content would depend on timing and differ between ranks. Several calls may read the same memory. Ignores GPU buffers.
class MemoryInUse {
 public:
  explicit MemoryInUse(Rank own) : own_(own) {}
  // Returns an earlier call that conflicts with the use of this tensor, or 0 if there is none.
  Handle user_of(const Signature& signature, const Submission& mine, const ProcessSet& set) const;
  // Returns an earlier call that conflicts with a copy from these elements or, if `writes` is true, to them. Returns 0
  // if there is none.
  Handle user_of(const Elements& elements, bool writes) const;
  void add(const Signature& signature, const Submission& mine, const ProcessSet& set);
  void remove(const Submission& mine);
  void clear();

 private:
  struct Range {
    uintptr_t begin;  // addresses
    uintptr_t end;
    Handle user;
  };
  using Ranges = std::vector<Range>;  // ascending by begin
  struct Buffers {
    Range read;  // empty if the call reads and writes the same memory
    Range written;
  };
  Buffers buffers_of(const Signature& signature, const Submission& mine,
                     const ProcessSet& set) const;
  static void insert(Ranges& ranges, const Range& one);
  static void erase(Ranges& ranges, const std::byte* buffer, Handle user);

  const Rank own_;
  Ranges written_;              // the ranges do not overlap
  Ranges read_;                 // the ranges may overlap
  uintptr_t longest_read_ = 0;  // length in bytes of the longest range in read_ since clear()
};

}  // namespace farandole
