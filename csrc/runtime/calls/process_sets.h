// SPDX-License-Identifier: Apache-2.0
// The process sets that this rank knows of, as the log has opened them.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "base/types.h"
#include "runtime/calls/handles.h"

namespace farandole {

struct ProcessSet {
  std::vector<Rank> ranks;  // ascending
  int member = -1;          // this rank's index; -1: not in it
  Handle join = 0;          // of this rank's join() under way; 0: it has not joined
  Failure join_failure;     // what this rank's next join() tells
  int members() const { return static_cast<int>(ranks.size()); }
  int member_of(Rank rank) const;  // -1: not in it
};

// Not thread-safe: the runtime holds its mutex.
class ProcessSets {
 public:
  explicit ProcessSets(Rank own) : own_(own) {}
  void open(SetId id, std::vector<Rank> ranks);
  void close(SetId id) { sets_.erase(id); }
  // nullptr: no such set.
  ProcessSet* find(SetId id);
  // Throws Error(kInvalidArgument) if there is no such set or this rank is not in it.
  ProcessSet& own(SetId id);
  // The set whose join this handle stands for; nullopt: none.
  std::optional<SetId> joined_by(Handle handle) const;
  // The job is broken: nobody's join() will be answered.
  void clear_joins();

 private:
  Rank own_;
  std::map<SetId, ProcessSet> sets_;
};

}  // namespace farandole
