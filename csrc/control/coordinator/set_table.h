// SPDX-License-Identifier: Apache-2.0
// The coordinator's process sets: who is in them, who has joined or left, and what waits in each.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "control/calls/call.h"
#include "control/calls/member_mask.h"
#include "control/calls/open_bundle.h"
#include "control/prediction/cycle.h"

namespace farandole {

// The calls of a set on one kind of memory, which its members' lane moves in buckets.
struct LaneQueue {
  std::deque<std::variant<Call*, OpenBundle*>> ready;  // complete, agreed, not published
  uint64_t published = 0;                              // buckets
  uint64_t done = 0;                                   // as the set's lowest rank says
  int64_t moving_since_ns = 0;                         // the bucket that moves now
  bool moving() const { return published > done; }
};

// Calls that are published together or not at all.
struct CallGroup {
  int settled = 0;           // calls that are complete
  std::vector<Call*> calls;  // those that wait for the others
  Failure failure;           // of one, hence of all
};

// A group whose first call can't be done, and which some members bring less of than others, or nothing: its
// calls will never be complete. It fails as a whole when those that are to come have come.
struct BrokenGroup {
  Call* first = nullptr;
  std::vector<std::string> names;  // several if the members disagree
  size_t reports = 0;              // of calls that follow
  Failure failure;
};

struct SetState {
  SetId id = 0;
  std::vector<Rank> ranks;  // ascending
  MemberMask joined;
  MemberMask left;
  Rank last_joined = -1;
  Failure join_failure;                       // the first that came with a Join
  std::deque<std::unique_ptr<Call>> unnamed;  // from first_unnamed on
  uint64_t first_unnamed = 0;
  std::map<uint64_t, std::unique_ptr<Call>> followers;  // unnamed, by sequence
  std::map<std::string, CallGroup> groups;
  std::vector<BrokenGroup> broken;
  std::vector<Call*> at_once;  // complete, agreed, and the log entry is all that they need
  LaneQueue host;
  LaneQueue gpu;
  Cycle cycle{0};  // what the set repeats

  int members() const { return static_cast<int>(ranks.size()); }
  Rank rank_of(int member) const { return ranks[static_cast<size_t>(member)]; }
  // -1: not in it.
  int member_of(Rank rank) const { return id == kWorldSet ? rank : found_at(rank); }
  int found_at(Rank rank) const;
  bool waits_for_lanes() const { return !host.ready.empty() || !gpu.ready.empty(); }
  // No group will become whole any more: what is under way in one has been given up.
  void drop_groups() {
    groups.clear();
    broken.clear();
  }
};

class SetTable {
 public:
  // With the world in it. repeats: as Cycle has it.
  SetTable(int world_size, int max_sets, int repeats);

  // The set of a report. nullptr: it was removed, which the rank can't have known. Throws Error(kInternal) if the
  // rank must have known better.
  SetState* of(SetId id, Rank from);
  // nullptr: there is none.
  SetState* find(SetId id);
  SetState& at(SetId id) { return *sets_.at(id); }
  SetState& world() { return at(kWorldSet); }
  // What keeps a set of these ranks from being opened; code kOk: nothing.
  Failure fault_of(std::span<const int64_t> wanted) const;
  // Under a number that was never given before.
  SetId open(std::vector<Rank> ranks);
  void erase(SetId id) { sets_.erase(id); }

  // In any state of the job: a rank that is gone is so in all sets, also in those that open later.
  void leave(Rank rank) { left_.insert(rank); }
  bool has_left(Rank rank) const { return left_.contains(rank); }
  std::vector<Rank> staying() const { return left_.missing(); }
  bool all_left() const { return left_.full(); }

  auto begin() { return sets_.begin(); }
  auto end() { return sets_.end(); }

 private:
  const int world_size_;
  const int max_sets_;
  const int repeats_;
  std::map<SetId, std::unique_ptr<SetState>> sets_;
  SetId next_ = kWorldSet;
  MemberMask left_;  // world ranks
};

}  // namespace farandole
