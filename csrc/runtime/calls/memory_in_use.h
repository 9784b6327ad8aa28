// SPDX-License-Identifier: Apache-2.0
// The host memory that this rank's calls read and write until they have ended. Part of RankCalls, under its mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/calls/tables.h"

namespace farandole {

// The bytes of one tensor's buffers, as far as they are known when it is submitted. A result that negotiation sizes counts
// with its least possible size.
struct BufferSizes {
  size_t input;
  size_t output;
};
// Throws the error of a call whose memory is in use by this one.
[[noreturn]] void refuse_in_use(const Request& request, const std::optional<CallKey>& by);
BufferSizes sizes_of(const Signature& signature, const Submission& mine, const ProcessSet& set);

// Memory that a call writes must not be read or written by another call before that one has ended: what it then holds
// would depend on timing, and differ by rank. Several calls may read the same memory. Buffers on GPUs are not tracked.
class MemoryInUse {
 public:
  explicit MemoryInUse(Rank own) : own_(own) {}
  // The earlier call that this tensor's call would have to wait for; 0: none.
  Handle user_of(const Signature& signature, const Submission& mine, const ProcessSet& set) const;
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
    Range read;  // empty if it is read and written
    Range written;
  };
  Buffers buffers_of(const Signature& signature, const Submission& mine,
                     const ProcessSet& set) const;
  static void insert(Ranges& ranges, const Range& one);
  static void erase(Ranges& ranges, const std::byte* buffer, Handle user);

  const Rank own_;
  Ranges written_;              // these do not overlap, but for tensors of one group
  Ranges read_;                 // these may
  uintptr_t longest_read_ = 0;  // bytes, of all since clear()
};

}  // namespace farandole
