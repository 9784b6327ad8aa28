// SPDX-License-Identifier: Apache-2.0
// The process sets that this rank knows, as the log has opened them.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "base/types.h"
#include "runtime/calls/handles.h"
#include "watch/recorder.h"

namespace farandole {

struct ProcessSet {
  std::vector<Rank> ranks;  // ascending
  int member = -1;          // this rank's index; -1: no member
  RecordedCall join;        // this rank's join() in flight; call 0: it has not joined
  bool join_told = false;   // to the coordinator
  Failure join_failure;     // sent with this rank's next join()
  bool joined() const { return join.call != 0; }
  int members() const { return static_cast<int>(ranks.size()); }
  int member_of(Rank rank) const { return index_in(ranks, rank); }  // -1: no member
};

// Not thread-safe: the caller holds RankCalls::mutex.
class ProcessSets {
 public:
  explicit ProcessSets(Rank own) : own_(own) {}
  void open(SetId id, std::vector<Rank> ranks);
  void close(SetId id) { sets_.erase(id); }
  // nullptr: no such set.
  ProcessSet* find(SetId id);
  // Throws Error(kInvalidArgument) if there is no such set or this rank is no member.
  ProcessSet& own(SetId id);
  // The set whose join has this handle; nullopt: none.
  std::optional<SetId> joined_by(Handle handle) const;
  // The job has failed: no join() will be answered.
  void clear_joins();

 private:
  Rank own_;
  std::map<SetId, ProcessSet> sets_;
};

}  // namespace farandole
