// SPDX-License-Identifier: Apache-2.0
// What the members of one call say that it is, and whether they agree.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "control/calls/member_mask.h"
#include "control/protocol/message.h"

namespace farandole {

// "'grad.w' (allreduce)": how messages name a call.
std::string text_of(const CallKey& key, const Request& request);

class Terms {
 public:
  // The first member to report sets the terms. `defined`: the request behind an id, if it came by id
  // (kept by reference: it outlives the call); else a copy of `request` is kept.
  void begin(const Request* defined, const Request& request);

  const Request& request() const { return defined_ ? *defined_ : proposed_; }
  bool redefines() const { return defined_ == nullptr; }
  bool agreed() const { return versions_.empty(); }  // all that have arrived so far
  // `same`: the request is known to be the call's (same id).
  bool match(const Request& request, bool same) const {
    return same || same_terms(request, this->request());
  }

  // A member arrives that does not agree with those before it, or these do not; `arrived`: they.
  void add(int member, const Request& request, const MemberMask& arrived);
  // A member that has joined: it brings no terms.
  void add_joined(int member);
  int joined() const { return joined_; }
  // A member that can't take part; the call fails.
  void refuse(int member, Failure failure);

  // The group that the call belongs to; several if its members disagree, none if it is alone, or if they
  // disagree about a size: then each call of the group fails by itself.
  struct Group {
    std::string name;
    int size;
  };
  std::vector<Group> groups() const;

  // Of the first call of a group: how many calls each opinion makes follow it, and how many hold it. `place`: of
  // the call, by its key.
  struct Led {
    std::string group;
    int followers;
    int members;
  };
  std::vector<Led> led(uint64_t place, const MemberMask& arrived) const;
  // Of such a one, once all have arrived: some members bring fewer calls than others, or refuse them all.
  bool uneven() const;
  // Members that have arrived by themselves, and have not refused.
  std::vector<int32_t> outspoken(const MemberMask& arrived) const;

  // What went wrong, once all have arrived; ranks[m] is member m's world rank.
  std::optional<Failure> failure(const CallKey& key, const std::vector<Rank>& ranks) const;

 private:
  struct Version {  // one opinion about the call, and who holds it
    Request request;
    std::vector<int32_t> members;
  };
  const Request* defined_ = nullptr;
  Request proposed_;
  std::vector<Version> versions_;  // empty while all agree
  std::vector<int32_t> silent_;    // arrived without terms: joined, or refused
  int joined_ = 0;                 // of these, the joined ones
  Failure refused_;
};

}  // namespace farandole
