// SPDX-License-Identifier: Apache-2.0
// What the members bring to one call: who has an input, of how many rows, and the bytes that rode along.
#pragma once

#include <vector>

#include "control/calls/member_mask.h"
#include "control/calls/rank_group.h"
#include "control/protocol/message.h"

namespace farandole {

class Inputs {
 public:
  void begin(int members);
  void end();  // gives the memory back too: there may be thousands of idle calls

  // Whether a member of `members` can bring this: what a rank's own checks let through, and nothing else, since
  // nobody looks at these sizes again.
  static bool sound(const Signature& signature, const Contribution& given, int members);
  void add(int member, const Signature& signature, const Contribution& given) {
    if (given.has_input) {
      with_input_.insert(member);
      ++count_;
    }
    if (signature.traits().ragged()) add_rows(member, signature, given);
    if (given.has_payload) add_payload(member, given.payload);
  }
  // Several members with an input and nothing else.
  void add_all(const MemberSlice& members);
  // A member that has joined.
  void add_none(const Signature& signature) { rows_.resize(told_rows(signature)); }

  bool has(int member) const { return with_input_.contains(member); }
  int count() const { return count_; }
  // Nobody brought a buffer.
  bool absent() const { return count_ == 0; }
  std::vector<int32_t> absent_members() const;
  // Every input rode along.
  bool rode_along() const { return rode_along_ == count_; }
  const std::vector<int64_t>& rows() const { return rows_; }  // as the log tells them
  // Of a member; empty: it brought none.
  ByteView payload(int member) const;
  const ByteString& payloads() const { return payloads_; }  // as they came
  size_t bytes(const Signature& signature) const;           // that the call moves, for fusion

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
  MemberMask with_input_;
  int count_ = 0;
  int rode_along_ = 0;
  std::vector<int64_t> rows_;
  ByteString payloads_;          // one behind the other
  std::vector<Extent> extents_;  // by member, in payloads_; empty until the first one
};

}  // namespace farandole
