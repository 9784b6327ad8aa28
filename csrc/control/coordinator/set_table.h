// SPDX-License-Identifier: Apache-2.0
// The coordinator's process sets: their members, the ranks that have joined or left, and their waiting calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "control/calls/call.h"
#include "control/calls/member_mask.h"
#include "control/protocol/message.h"

namespace farandole {

// Holds the coordinator's output until it is taken: log entries, messages to users, and late ranks.
class Outbox {
 public:
  // The last rank that was ready for a call, and its delay after the first rank.
  struct LateRank {
    Rank rank;
    int64_t after_ns;
  };

  void write(Entry entry) { log_.push_back(std::move(entry)); }
  // If no other entry is waiting, writes an entry as a sign of life.
  void write_something() {
    if (log_.empty()) write(Answer{});
  }
  // Makes a call fail if a rank reports it too late. Every rank reads every entry, so one entry answers one late report
  // of each rank. A batch therefore needs no more entries than the largest number of late reports from one rank.
  void fail_late(Rank from, const CallKey& key, const Failure& failure) {
    LateCall& call = late_calls_[{key.set, key.name, key.sequence}];
    if (++call.reports[from] <= call.entries) return;
    ++call.entries;
    write(Fail{key, failure});
  }
  void notice(std::string text) { notices_.push_back(std::move(text)); }
  void came_last(Rank rank, int64_t after_ns) { late_ranks_.push_back({rank, after_ns}); }

  // Replaces the content of `log` with the entries, in order. Ends the batch.
  void take(std::vector<Entry>& log) {
    log.clear();
    log.swap(log_);
    late_calls_.clear();
  }
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  void take_late_ranks(std::vector<LateRank>& into) {
    into.clear();
    into.swap(late_ranks_);
  }

 private:
  std::vector<Entry> log_;
  struct LateCall {
    int entries = 0;
    std::map<Rank, int> reports = {};
  };
  std::map<std::tuple<SetId, std::string, uint64_t>, LateCall> late_calls_;
  std::vector<std::string> notices_;
  std::vector<LateRank> late_ranks_;
};

struct CoordinatorSettings {
  int size = 1;                          // number of ranks in the world
  size_t fusion_bytes = 32 << 20;        // per bucket on the CPU
  size_t gpu_fusion_bytes = 64 << 20;    // per bucket on the GPU
  std::string gpu_backend = "auto";      // auto, nccl or host
  std::string shared_gpu = "error";      // if two ranks use the same GPU: error, host or nccl
  std::string gpu_order = "background";  // background or program
  size_t capacity = 8192;                // number of ids in use at the same time
  bool check_sites = false;  // makes unnamed calls fail if they match from different lines
  int max_sets = 64;         // number of process sets at the same time, including the world
  int64_t stall_warn_ns = 10'000'000'000;    // 0 means never
  int64_t stall_abort_ns = 300'000'000'000;  // 0 means never
  std::vector<Rank> above = {};  // from HostTree::above(); empty if there is only one host
};

// A set's calls on one kind of memory. The lanes of the members move these calls in buckets.
struct LaneQueue {
  std::deque<Call*> ready;  // complete calls on which all ranks agree, not yet published
  uint64_t published = 0;   // number of buckets
  uint64_t done = 0;  // number of buckets that the lowest rank of the set has reported as done
};

struct SetState {
  SetId id = 0;
  std::vector<Rank> ranks;  // ascending
  MemberMask joined;
  MemberMask left;
  Rank last_joined = -1;
  int64_t joined_since_ns = 0;  // time of the first Join
  bool join_given_up = false;   // true if the join must end although some ranks have not joined
  Failure join_failure;         // the first failure that a Join reported
  std::deque<std::unique_ptr<Call>> unnamed;  // calls from number first_unnamed on
  uint64_t first_unnamed = 0;
  std::vector<Call*> at_once;  // complete calls on which all ranks agree and that need no bucket
  LaneQueue host;
  LaneQueue gpu;

  int members() const { return static_cast<int>(ranks.size()); }
  Rank rank_of(int member) const { return ranks[static_cast<size_t>(member)]; }
  // Returns the index of a member, or -1 if the rank is not a member.
  int member_of(Rank rank) const { return id == kWorldSet ? rank : index_in(ranks, rank); }
  // True if members wait in join() for other members.
  bool joins() const { return !joined.empty() && !joined.full() && !join_given_up; }
  bool waits_for_lanes() const { return !host.ready.empty() || !gpu.ready.empty(); }
};

Failure removed(SetId set);

class SetTable {
 public:
  SetTable(int world_size, int max_sets);

  // Finds the set of a report. Returns null if the set was removed, which `from` may not know yet. Throws
  // Error(kInternal) if `from` is not a member.
  SetState* of(SetId id, Rank from);
  SetState* find(SetId id);
  SetState& at(SetId id) { return *sets_.at(id); }
  SetState& world() { return at(kWorldSet); }
  // Returns the reason why a set of these ranks cannot be opened, or kOk if it can. If `alike_allowed` is true, another
  // set may have the same ranks.
  Failure fault_of(std::span<const int64_t> wanted, bool alike_allowed) const;
  // Opens a set that has a new number.
  SetId open(std::vector<Rank> ranks);
  // Returns the pair of these ranks. If the pair does not exist yet, writes the log entry that opens it.
  SetState& pair(Rank a, Rank b, Outbox& outbox);
  void erase(SetId id) { sets_.erase(id); }

  // Stores the failure of a by_members() call under the name of the call, for ranks that report this name later. The
  // failure is never removed, because a rank may be arbitrarily late.
  void bar(const std::string& name, Failure failure) { barred_.emplace(name, failure); }
  // Returns nullptr if no failure is stored or the request is not by_members().
  const Failure* barred(const Request& request) const {
    auto found = by_members(request) ? barred_.find(request.name) : barred_.end();
    return found == barred_.end() ? nullptr : &found->second;
  }

  // Records that the rank has left, also for sets that will be opened later. May be called in any state of the job.
  void leave(Rank rank) { left_.insert(rank); }
  bool has_left(Rank rank) const { return left_.contains(rank); }
  std::vector<Rank> staying() const { return left_.missing(); }
  bool all_left() const { return left_.full(); }

  auto begin() { return sets_.begin(); }
  auto end() { return sets_.end(); }
  // Returns the sets that are visible to users, which are all sets except pairs.
  auto known() { return std::ranges::subrange(sets_.lower_bound(kWorldSet), sets_.end()); }
  auto known() const { return std::ranges::subrange(sets_.lower_bound(kWorldSet), sets_.end()); }

 private:
  SetState& add(SetId id, std::vector<Rank> ranks);

  const int world_size_;
  const int max_sets_;
  std::map<SetId, std::unique_ptr<SetState>> sets_;
  std::map<std::pair<Rank, Rank>, SetId> pairs_;  // the lower rank comes first
  SetId next_ = kWorldSet;
  MemberMask left_;  // world ranks
  std::map<std::string, Failure> barred_;
};

}  // namespace farandole
