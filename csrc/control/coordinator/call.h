// SPDX-License-Identifier: Apache-2.0
// One call on its way: which members have reported, what they bring, and whether they agree.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "control/coordinator/member_mask.h"
#include "control/coordinator/rank_group.h"
#include "control/protocol/message.h"

namespace farandole {

class Call {
 public:
  // The first member to report sets the terms. `defined`: the request behind an id, if it came by id
  // (kept by reference: it outlives the call); else the call owns a copy of `request`.
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
  const Request& request() const { return defined_ ? *defined_ : proposed_; }
  const Signature& signature() const { return request().signature; }
  bool redefines() const { return defined_ == nullptr; }
  // All that have arrived so far agree with what its id stands for, and bring an input.
  bool plain() const {
    return defined_ && versions_.empty() && inputs_ == members_ - remaining_ && !given_up_;
  }
  int64_t since_ns() const { return since_ns_; }

  // A member reports. `same`: its request is known to be the call's (same id). Throws
  // Error(kInternal) if the member has reported before, or brings what it could not have.
  void arrive(int member, const Request& request, bool same, const Contribution& contribution);
  // When a member has made the call.
  void note(int member, int64_t now_ns) {
    if (first_member_ < 0) first_member_ = member;
    last_member_ = member;
    last_ns_ = now_ns;
  }
  int first_member() const { return first_member_; }  // -1: joined members only, or refused
  int last_member() const { return last_member_; }
  int64_t last_ns() const { return last_ns_; }
  // Several members with input and the call's own terms; false: not so simple, nothing has changed.
  bool arrive_all(const MemberSlice& members);
  // A member that has joined: takes part without a buffer.
  void arrive_joined(int member);
  int active_members() const { return members_ - static_cast<int>(joined_); }
  // A member refuses; the call fails once all have arrived.
  void refuse(int member, Failure failure);

  bool has_arrived(int member) const { return arrived_.contains(member); }
  bool complete() const { return remaining_ == 0; }
  const MemberMask& arrived() const { return arrived_; }

  // The group that it belongs to; several if its members disagree, none if it is alone, or if they
  // disagree about a size: then each call of the group fails by itself.
  struct GroupTerms {
    std::string name;
    int size;
  };
  std::vector<GroupTerms> groups() const;

  // What went wrong, once complete; ranks[m] is member m's world rank.
  std::optional<Failure> failure(const std::vector<Rank>& ranks) const;

  // Nobody brought a buffer.
  bool absent() const { return inputs_ == 0; }
  // Every input rode along.
  bool rode_along() const { return rode_along_ == inputs_; }
  std::vector<int32_t> absent_members() const;
  const std::vector<int64_t>& rows() const { return rows_; }
  // Of a member; empty: it brought none.
  ByteView payload(int member) const;
  const ByteString& payloads() const { return payloads_; }  // as they came
  bool has_input(int member) const { return with_input_.contains(member); }
  size_t bytes() const;  // that the call moves, for fusion

 private:
  struct Version {  // one opinion about the call, and who holds it
    Request request;
    std::vector<int32_t> members;
  };
  void take(int member);
  void disagree(int member, const Request& request);
  bool sound(const Contribution& given) const;
  size_t told_rows() const;
  std::vector<int32_t> members_with_terms() const;

  bool open_ = false;
  bool queued_ = false;
  CallKey key_;
  uint32_t id_ = 0;
  const Request* defined_ = nullptr;
  Request proposed_;
  int members_ = 0;
  int64_t since_ns_ = 0;
  int first_member_ = -1;
  int last_member_ = -1;
  int64_t last_ns_ = 0;

  int remaining_ = 0;
  MemberMask arrived_;
  MemberMask with_input_;
  int inputs_ = 0;
  int rode_along_ = 0;
  std::vector<int64_t> rows_;
  struct Extent {
    uint32_t offset = 0;
    uint32_t bytes = 0;
  };
  ByteString payloads_;            // one behind the other
  std::vector<Extent> extents_;    // by member, in payloads_; empty until the first one
  std::vector<Version> versions_;  // empty while all agree
  std::vector<int32_t> silent_;    // arrived without terms: joined, or refused
  size_t joined_ = 0;              // of these, the joined ones
  Failure refused_;
  Failure given_up_;
};

// "'grad.w' (allreduce)": how messages name a call.
std::string text_of(const CallKey& key, const Request& request);

}  // namespace farandole
