// SPDX-License-Identifier: Apache-2.0
// Decides about calls that all ranks have reported: whether they fail, and else log entries: results known at once,
// process sets, and buckets for the lanes.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "control/coordinator/open_calls.h"
#include "control/coordinator/set_table.h"

namespace farandole {

// Decides, once per process set and before its first GPU bucket, how its GPU tensors travel; then passes on the key by
// which its members connect.
class BackendPolicy {
 public:
  explicit BackendPolicy(Shared& shared) : shared_(shared) {}

  // Every rank reports its GPU before its first GPU tensor.
  void describe(Rank from, const UseGpu& gpu) { gpus_[from] = gpu; }
  bool is_open(SetId set) const { return open_.contains(set); }
  // Throws Error with the reason if the set can't use GPUs together.
  void open(const SetState& set);
  void connect(const SetState& set, Rank from, const SetUp& key);
  void close(SetId set) { open_.erase(set); }

 private:
  BackendKind backend_of(const SetState& set);
  std::optional<std::pair<Rank, Rank>> sharing(const SetState& set) const;

  Shared& shared_;
  std::map<Rank, UseGpu> gpus_;
  std::set<SetId> open_;
};

// Unnamed calls that ranks make from different lines of the program. Calls without a name match by their order, so if one
// rank swaps or skips one, it may match another tensor's call of the same form, and the result is wrong though nothing
// fails.
class CallSites {
 public:
  explicit CallSites(Shared& shared) : shared_(shared) {}

  // To be called once for each call that is complete and agreed. Unless such a call fails (check_sites), the set's ranks
  // get a notice, one for all calls that match from the same lines.
  Failure judge(const SetState& set, const Call& call);

 private:
  Shared& shared_;
  std::set<std::string> noticed_;  // lines
};

class Publisher {
 public:
  explicit Publisher(Shared& shared) : shared_(shared), backends_(shared), sites_(shared) {}

  BackendPolicy& backends() { return backends_; }
  // After a report of the call. If it is complete: fails or queues it.
  void judge(SetState& set, Call& call);
  // Takes a call that is complete and agreed.
  void queue(SetState& set, Call& call);
  // Writes all entries that can go out now, for all sets. Returns whether a lane of host memory begins to move.
  bool flush(int64_t now_ns);

 private:
  bool flush(SetState& set, int64_t now_ns);
  Failure verdict(const SetState& set, Call& call);
  Failure fault_of_root(const SetState& set, const Call& call, size_t part) const;
  void define(Call& call);
  void define(Definition& definition);
  void finish_at_once(SetState& set, Call& call);
  void add_set(const CallKey& key, std::span<const int64_t> ranks, bool alone);
  void remove_set(const CallKey& key, SetId id);
  bool may_run(const LaneQueue& lane) const;
  bool open_gpu(SetState& set);
  bool run_bucket(SetState& set, bool gpu, int64_t now_ns);  // whether its lane begins to move
  void end_join(SetState& set);

  Shared& shared_;
  BackendPolicy backends_;
  CallSites sites_;
  std::set<SetId> busy_pairs_;  // with calls to publish
};

}  // namespace farandole
