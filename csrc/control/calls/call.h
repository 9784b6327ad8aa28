// SPDX-License-Identifier: Apache-2.0
// One call on its way: which members have reported, when, what they bring, and whether they agree.
#pragma once

#include "control/calls/inputs.h"
#include "control/calls/member_mask.h"
#include "control/calls/rank_group.h"
#include "control/calls/terms.h"

namespace farandole {

class Call {
 public:
  // defined: as Terms::begin() has it.
  void open(CallKey key, uint32_t id, const Request* defined, const Request& request, int members,
            int64_t now_ns);
  void close();
  bool is_open() const { return open_; }
  // Complete, agreed, and waiting to be published only.
  void queue() { queued_ = true; }
  bool is_queued() const { return queued_; }
  // Given up before all had arrived: whoever comes late fails at once. Unnamed calls only.
  void give_up(Failure failure) { given_up_ = std::move(failure); }
  const Failure& given_up() const { return given_up_; }

  const CallKey& key() const { return key_; }
  uint32_t id() const { return id_; }
  const Terms& terms() const { return terms_; }
  const Inputs& inputs() const { return inputs_; }
  const Request& request() const { return terms_.request(); }
  const Signature& signature() const { return request().signature; }
  size_t bytes() const { return inputs_.bytes(signature()); }
  // All that have arrived so far agree with what its id stands for, and bring an input.
  bool plain() const {
    return !terms_.redefines() && terms_.agreed() && inputs_.count() == arrived_.count() &&
           !given_up_;
  }

  // A member reports. `same`: its request is known to be the call's (same id). Throws
  // Error(kInternal) if the member has reported before, or brings what it could not have.
  void arrive(int member, const Request& request, bool same, const Contribution& contribution);
  // Several members with input and the call's own terms; false: not so simple, nothing has changed.
  bool arrive_all(const MemberSlice& members);
  // A member that has joined: takes part without a buffer.
  void arrive_joined(int member);
  // A member refuses; the call fails once all have arrived.
  void refuse(int member, Failure failure);
  const MemberMask& arrived() const { return arrived_; }
  bool complete() const { return arrived_.full(); }

  // When members have made the call.
  struct Times {
    int64_t since_ns = 0;
    int64_t last_ns = 0;
    int first_member = -1;  // -1: joined members only, or refused
    int last_member = -1;
  };
  const Times& times() const { return times_; }
  void note(int member, int64_t now_ns) {
    if (times_.first_member < 0) times_.first_member = member;
    times_.last_member = member;
    times_.last_ns = now_ns;
  }

 private:
  void take(int member);

  bool open_ = false;
  bool queued_ = false;
  CallKey key_;
  uint32_t id_ = 0;
  int members_ = 0;
  MemberMask arrived_;
  Terms terms_;
  Inputs inputs_;
  Times times_;
  Failure given_up_;
};

}  // namespace farandole
