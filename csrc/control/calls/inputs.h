// SPDX-License-Identifier: Apache-2.0
// The inputs of one call: which members have one, how many rows, and payloads sent with the reports.
#pragma once

#include <vector>

#include "control/calls/member_mask.h"
#include "control/protocol/message.h"

namespace farandole {

class Inputs {
 public:
  void begin(int members);
  void end();  // frees memory, since thousands of calls may be idle

  // Whether a member's contribution is valid: as strict as the rank's own checks, because nobody checks these
  // sizes again.
  static bool sound(const Signature& signature, const Contribution& given, int members);
  void add(int member, const Signature& signature, const Contribution& given) {
    if (given.has_input) add_plain(member);
    if (signature.traits().ragged()) add_rows(member, signature, given);
    if (given.has_payload) add_payload(member, given.payload);
  }
  // Take members with an input and nothing else.
  void add_plain(int member) {
    with_input_.insert(member);
    ++count_;
  }
  void add_all(const MemberSlice& members);
  // Takes a member that has joined.
  void add_none(const Signature& signature) { rows_.resize(told_rows(signature)); }

  bool has(int member) const { return with_input_.contains(member); }
  int count() const { return count_; }
  // No member has a buffer.
  bool absent() const { return count_ == 0; }
  std::vector<int32_t> absent_members() const;
  // Every input came with its report.
  bool rode_along() const { return rode_along_ == count_; }
  const std::vector<int64_t>& rows() const { return rows_; }  // as the log entry carries them
  // A member's payload; empty: none.
  ByteView payload(int member) const;
  const ByteString& payloads() const { return payloads_; }  // in order of arrival
  size_t bytes(const Signature& signature) const;           // moved by the call; counts for fusion

 private:
  struct Extent {
    uint32_t offset = 0;
    uint32_t bytes = 0;
  };
  void add_rows(int member, const Signature& signature, const Contribution& given);
  void add_payload(int member, ByteView payload);
  size_t told_rows(const Signature& signature) const {
    return signature.traits().told_rows(static_cast<size_t>(members_));
  }

  int members_ = 0;
  int count_ = 0;
  MemberMask with_input_;
  int rode_along_ = 0;
  std::vector<int64_t> rows_;
  ByteString payloads_;          // concatenated
  std::vector<Extent> extents_;  // by member, in payloads_; empty before the first
};

}  // namespace farandole
