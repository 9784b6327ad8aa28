// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/process_sets.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace farandole {

void ProcessSets::open(SetId id, std::vector<Rank> ranks) {
  ProcessSet set;
  set.ranks = std::move(ranks);
  set.member = set.member_of(own_);
  sets_[id] = std::move(set);
}

ProcessSet* ProcessSets::find(SetId id) {
  auto found = sets_.find(id);
  return found == sets_.end() ? nullptr : &found->second;
}

ProcessSet& ProcessSets::own(SetId id) {
  ProcessSet* set = find(id);
  if (!set) {
    throw Error(ErrorCode::kInvalidArgument,
                "there is no process set " + std::to_string(id) +
                    "; was it removed, or never added with add_process_set()?");
  }
  if (set->member < 0) {
    throw Error(ErrorCode::kInvalidArgument, "rank " + std::to_string(own_) +
                                                 " is not in process set " + std::to_string(id) +
                                                 " of " + text_of_ranks(set->ranks));
  }
  return *set;
}

std::optional<SetId> ProcessSets::joined_by(Handle handle) const {
  for (const auto& [id, set] : sets_) {
    if (set.join.call == handle) return id;
  }
  return std::nullopt;
}

void ProcessSets::clear_joins() {
  for (auto& [id, set] : sets_) set.join = {};
}

}  // namespace farandole
