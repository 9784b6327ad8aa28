// SPDX-License-Identifier: Apache-2.0
// One call in flight, as the coordinator sees it: who has reported, with which inputs, and do they agree.
#pragma once

#include "control/calls/inputs.h"
#include "control/calls/member_mask.h"
#include "control/calls/terms.h"

namespace farandole {

// Whether only the ranks in its shape take part in a call that adds or removes a set, not the whole world. Sets
// added so may be alike; the call's name is the set's, and never used again.
inline bool by_members(const Request& request) {
  return request.signature.traits().changes_sets && !request.group.empty();
}

class Call {
 public:
  // `defined`: see Terms::begin().
  void open(CallKey key, uint32_t id, const Request* defined, const Request& request, int members,
            int64_t now_ns);
  void close();
  bool is_open() const { return open_; }
  // Complete and agreed; only waits to be published.
  void queue() { queued_ = true; }
  bool is_queued() const { return queued_; }
  // Fails it before all members have reported: late ones fail at once. Only for unnamed calls.
  void give_up(Failure failure) {
    given_up_ = std::move(failure);
    takes_plain_ = false;
  }
  const Failure& given_up() const { return given_up_; }

  SetId set() const { return set_; }
  const CallKey& key() const { return key_; }
  uint32_t id() const { return id_; }
  const Terms& terms() const { return terms_; }
  const Inputs& inputs() const { return inputs_; }
  const Request& request() const { return terms_.request(); }
  const Signature& signature() const { return request().signature; }
  size_t bytes() const { return inputs_.bytes(signature()); }

  // Takes a member's report. `same`: it has this call's id, so the request is the same. Throws
  // Error(kInternal) if the member has reported already or its contribution is invalid.
  void arrive(int member, const Request& request, bool same, const Contribution& contribution);
  // Takes plain contributions under the call's id from one member, or from several; false: not applicable, no
  // change.
  bool arrive_plain(int member);
  bool arrive_plain(const MemberSlice& members);
  // Notes other terms of a member that this call does without (by_members): the call will fail.
  void contradict(int member, const Request& request) {
    terms_.add(member, request, arrived_);
    takes_plain_ = false;
  }
  // Takes a member that has joined, or does not take part; it has no buffer.
  void arrive_joined(int member);
  // Takes a member's refusal; the call fails once all have reported.
  void refuse(int member, Failure failure);
  const MemberMask& arrived() const { return arrived_; }
  bool complete() const { return arrived_.full(); }

  // When the first and the last report came, and from whom.
  struct Times {
    int64_t since_ns = 0;
    int64_t last_ns = 0;
    int first_member = -1;  // -1: only joined members, or refusals
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

  // What each plain contribution touches comes first, to be in few cache lines.
  bool open_ = false;
  bool queued_ = false;
  // A plain contribution under its id adds nothing but an input: all agree with its definition.
  bool takes_plain_ = false;
  SetId set_ = kWorldSet;
  uint32_t id_ = 0;
  int members_ = 0;
  MemberMask arrived_;
  Inputs inputs_;
  Times times_;
  CallKey key_;
  Terms terms_;
  Failure given_up_;
};

}  // namespace farandole
