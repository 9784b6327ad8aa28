// SPDX-License-Identifier: Apache-2.0
// What each member of a call requested, and whether they agree.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/calls/member_mask.h"
#include "control/protocol/message.h"

namespace farandole {

// "'grad.w' (allreduce)": how error messages name a call.
std::string text_of(const CallKey& key, const Request& request);

// What ranks say, and who says it: by the lowest rank of each opinion.
using RanksByValue = std::vector<std::pair<std::string, std::vector<Rank>>>;
// "(3, 4) on rank 0, (4, 3) on ranks 1-2"
std::string text_of(const RanksByValue& opinions);

class Terms {
 public:
  // The first report sets the terms. `defined`: the request of its id (referenced; it outlives the call), or
  // null to keep a copy of `request`.
  void begin(const Request* defined, const Request& request);

  const Request& request() const { return defined_ ? *defined_ : proposed_; }
  bool redefines() const { return defined_ == nullptr; }
  bool agreed() const { return versions_.empty(); }  // all reports so far, also about the site
  // `same`: the request has this call's id.
  bool match(const Request& request, bool same) const {
    return same || same_terms(request, this->request());
  }
  // The same, also about the site.
  bool equal(const Request& request, bool same) const {
    return same || (same_terms(request, this->request()) && request.site == this->request().site);
  }

  // Adds a report, if it or an earlier one differs from the first. `arrived`: the members before it.
  void add(int member, const Request& request, const MemberMask& arrived);
  // Adds a member that has joined; it has no terms.
  void add_joined(int member);
  int joined() const { return joined_; }
  // Adds a refusal; the call will fail.
  void refuse(int member, Failure failure);
  const Failure& refused() const { return refused_; }  // the first; code kOk: none

  // The groups that its members name: one, or several if they disagree. A group on whose size they disagree
  // is left out: its calls then fail one by one.
  struct Group {
    std::string name;
    int size;
  };
  std::vector<Group> groups() const;

  // If this is the first call of a group: for each version of the group, how many calls follow and how many
  // members have it. `index_in_group`: of this call, from its key.
  struct Led {
    std::string group;
    int followers;
    int members;
  };
  std::vector<Led> led(uint64_t index_in_group, const MemberMask& arrived) const;
  // Whether, once all have reported, members differ in the number of calls in the group or some refuse.
  bool uneven() const;
  // Members that have reported terms: neither joined nor refusing.
  std::vector<int32_t> outspoken(const MemberMask& arrived) const;

  // Why the call fails, once all have reported; ranks[m] is the world rank of member m.
  std::optional<Failure> failure(const CallKey& key, const std::vector<Rank>& ranks) const;
  // The sites from which its members make it, each with their ranks, if there are several; else none.
  RanksByValue sites(const std::vector<Rank>& ranks) const;
  // Requests of members that differ from request() in the site only.
  std::vector<Request> of_other_sites() const;

 private:
  struct Version {  // one version of the request, its site included, and the members that sent it
    Request request;
    std::vector<int32_t> members;
  };
  RanksByValue opinions(std::string (*text)(const Request&), const std::vector<Rank>& ranks) const;
  const Request* defined_ = nullptr;
  Request proposed_;
  std::vector<Version> versions_;  // empty while all agree
  std::vector<int32_t> silent_;    // reported without terms: joined, or refused
  int joined_ = 0;                 // how many of these have joined
  Failure refused_;
};

}  // namespace farandole
