// SPDX-License-Identifier: Apache-2.0
// Turns calls that all ranks have reported into log entries, which contain failures, results, process sets or buckets.
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

// Chooses a set's GPU backend once, before its first GPU bucket. Then logs the key that the members need to connect.
class BackendPolicy {
 public:
  explicit BackendPolicy(Shared& shared) : shared_(shared) {}

  // Takes a rank's description of its GPU, which arrives before the rank's first GPU tensor.
  void describe(Rank from, const UseGpu& gpu) { gpus_[from] = gpu; }
  bool is_open(SetId set) const { return open_.contains(set); }
  // If the members of the set cannot use GPUs together, throws Error with the reason.
  void open(const SetState& set);
  void connect(const SetState& set, Rank from, const OpenGpu& key);
  void close(SetId set) { open_.erase(set); }

 private:
  BackendKind backend_of(const SetState& set);
  std::optional<std::pair<Rank, Rank>> sharing(const SetState& set) const;

  Shared& shared_;
  std::map<Rank, UseGpu> gpus_;
  std::set<SetId> open_;
};

// Finds unnamed calls that ranks make from different lines of the program. Unnamed calls match by their order. If a
// rank skips one of them, its next call may match a call on a different tensor of equal shape. The results are then
// wrong, but no error is raised.
class CallSites {
 public:
  explicit CallSites(Shared& shared) : shared_(shared) {}

  // Call this once for each complete call on which the ranks agree. If the lines differ, returns a failure if
  // check_sites is set. Otherwise sends a notice to the ranks of the set, once for each combination of lines.
  Failure judge(const SetState& set, const Call& call);

 private:
  Shared& shared_;
  std::set<std::string> noticed_;  // the lines of calls for which a notice was sent
};

class Publisher {
 public:
  explicit Publisher(Shared& shared) : shared_(shared), backends_(shared), sites_(shared) {}

  BackendPolicy& backends() { return backends_; }
  // Call this after each report. If the call is complete, makes it fail or queues it.
  void judge(SetState& set, Call& call);
  void queue(SetState& set, Call& call);
  // Writes all entries that can be written now, for all sets.
  void flush();

 private:
  void flush(SetState& set);
  Failure verdict(const SetState& set, Call& call);
  Failure fault_of_root(const SetState& set, const Call& call, size_t part) const;
  void define(Call& call);
  void define(Definition& definition);
  void finish_at_once(SetState& set, Call& call);
  void add_set(const CallKey& key, std::span<const int64_t> ranks, bool alone);
  void remove_set(const CallKey& key, SetId id);
  bool may_run(const LaneQueue& lane) const;
  bool open_gpu(SetState& set);
  void run_bucket(SetState& set, bool gpu);
  void end_join(SetState& set);

  Shared& shared_;
  BackendPolicy backends_;
  CallSites sites_;
  std::set<SetId> busy_pairs_;  // pairs that have calls to publish
};

}  // namespace farandole
