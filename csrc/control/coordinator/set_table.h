// SPDX-License-Identifier: Apache-2.0
// The coordinator's process sets: members, who has joined or left, and the calls waiting in each.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <vector>

#include "control/calls/call.h"
#include "control/calls/member_mask.h"
#include "control/coordinator/outbox.h"

namespace farandole {

// A set's calls on one kind of memory, which its members' lane moves in buckets.
struct LaneQueue {
  std::deque<Call*> ready;      // complete and agreed, not published
  uint64_t published = 0;       // buckets
  uint64_t done = 0;            // as reported by the set's lowest rank
  int64_t moving_since_ns = 0;  // start of the bucket that moves now
  bool moving() const { return published > done; }
};

// Calls that are published together or not at all.
struct CallGroup {
  int complete = 0;          // calls
  std::vector<Call*> calls;  // that wait for the others
  Call* leader = nullptr;    // the one of them whose name the group has, or the first unnamed one
  Failure failure;           // of one call, and so of all
};

// A group whose first call has failed, and which some members report less of than others, so its other calls
// would never be complete. It fails as a whole once all expected reports have come.
struct BrokenGroup {
  Call* first = nullptr;
  std::vector<std::string> names;  // several if the members disagree
  size_t reports = 0;              // expected, of the calls that follow
  Failure failure;
};

struct SetState {
  SetId id = 0;
  std::vector<Rank> ranks;  // ascending
  MemberMask joined;
  MemberMask left;
  Rank last_joined = -1;
  Failure join_failure;                       // the first one that came with a Join
  std::deque<std::unique_ptr<Call>> unnamed;  // starting at first_unnamed
  uint64_t first_unnamed = 0;
  std::map<uint64_t, std::unique_ptr<Call>> followers;  // unnamed, by sequence
  std::map<std::string, CallGroup> groups;
  std::vector<BrokenGroup> broken;
  std::vector<Call*> at_once;  // complete and agreed; their log entry completes them
  LaneQueue host;
  LaneQueue gpu;

  int members() const { return static_cast<int>(ranks.size()); }
  Rank rank_of(int member) const { return ranks[static_cast<size_t>(member)]; }
  // -1: not a member.
  int member_of(Rank rank) const { return id == kWorldSet ? rank : index_in(ranks, rank); }
  bool waits_for_lanes() const { return !host.ready.empty() || !gpu.ready.empty(); }
  // Forgets all groups, after their calls in flight have been given up.
  void drop_groups() {
    groups.clear();
    broken.clear();
  }
};

Failure removed(SetId set);

class SetTable {
 public:
  // Starts with the world's set.
  SetTable(int world_size, int max_sets);

  // The set of a report. nullptr: it was removed, which the rank may not know yet. Throws Error(kInternal) if
  // the rank should know that it is no member.
  SetState* of(SetId id, Rank from);
  // nullptr: no such set.
  SetState* find(SetId id);
  SetState& at(SetId id) { return *sets_.at(id); }
  SetState& world() { return at(kWorldSet); }
  // Why a set of these ranks can't be opened; code kOk: it can. `alike_allowed`: there may be one of the same ranks.
  Failure fault_of(std::span<const int64_t> wanted, bool alike_allowed) const;
  // Gives it a number that was never used before.
  SetId open(std::vector<Rank> ranks);
  // The pair of these ranks; the log opens it when they first meet.
  SetState& pair(Rank a, Rank b, Outbox& outbox);
  void erase(SetId id) { sets_.erase(id); }

  // What a call by_members came to, for ranks that report its name afterwards: they have other members in mind.
  // Kept for good, because a rank may be late by any time.
  void bar(const std::string& name, Failure failure) { barred_.emplace(name, failure); }
  // nullptr: nothing yet.
  const Failure* barred(const std::string& name) const {
    auto found = barred_.find(name);
    return found == barred_.end() ? nullptr : &found->second;
  }

  // The rank counts as gone in all sets, also in those opened later. Allowed in any state of the job.
  void leave(Rank rank) { left_.insert(rank); }
  bool has_left(Rank rank) const { return left_.contains(rank); }
  std::vector<Rank> staying() const { return left_.missing(); }
  bool all_left() const { return left_.full(); }

  auto begin() { return sets_.begin(); }
  auto end() { return sets_.end(); }
  // The sets that users know: all but pairs.
  auto known() { return std::ranges::subrange(sets_.lower_bound(kWorldSet), sets_.end()); }
  auto known() const { return std::ranges::subrange(sets_.lower_bound(kWorldSet), sets_.end()); }

 private:
  SetState& add(SetId id, std::vector<Rank> ranks);

  const int world_size_;
  const int max_sets_;
  std::map<SetId, std::unique_ptr<SetState>> sets_;
  std::map<std::pair<Rank, Rank>, SetId> pairs_;  // the lower rank first
  SetId next_ = kWorldSet;
  MemberMask left_;  // world ranks
  std::map<std::string, Failure> barred_;
};

}  // namespace farandole
