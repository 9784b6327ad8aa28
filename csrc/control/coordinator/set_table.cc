// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/set_table.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace farandole {

int SetState::found_at(Rank rank) const {
  auto found = std::lower_bound(ranks.begin(), ranks.end(), rank);
  if (found == ranks.end() || *found != rank) return -1;
  return static_cast<int>(found - ranks.begin());
}

SetTable::SetTable(int world_size, int max_sets, int repeats)
    : world_size_(world_size), max_sets_(max_sets), repeats_(repeats), left_(world_size) {
  std::vector<Rank> world(static_cast<size_t>(world_size));
  std::iota(world.begin(), world.end(), 0);
  open(std::move(world));
}

SetState* SetTable::of(SetId id, Rank from) {
  SetState* found = find(id);
  if (!found && id > kWorldSet && id < next_) return nullptr;
  if (!found || found->member_of(from) < 0) {
    throw Error(ErrorCode::kInternal, "rank " + std::to_string(from) + " reports to process set " +
                                          std::to_string(id) + ", which is none of its own");
  }
  return found;
}

SetState* SetTable::find(SetId id) {
  auto found = sets_.find(id);
  return found == sets_.end() ? nullptr : found->second.get();
}

Failure SetTable::fault_of(std::span<const int64_t> wanted) const {
  bool ascending = std::ranges::adjacent_find(wanted, std::greater_equal<>()) == wanted.end();
  bool sound = !wanted.empty() && ascending && wanted.front() >= 0 && wanted.back() < world_size_;
  for (auto& [id, set] : sets_) {
    if (!std::ranges::equal(set->ranks, wanted)) continue;
    return {ErrorCode::kInvalidArgument, "a process set of " + text_of_ranks(set->ranks) +
                                             " exists already, with id " + std::to_string(id)};
  }
  if (sets_.size() >= static_cast<size_t>(max_sets_)) {
    return {ErrorCode::kInvalidArgument,
            "there are " + std::to_string(max_sets_) +
                " process sets already; remove one, or raise FARANDOLE_PROCESS_SETS"};
  }
  if (sound) return {};
  return {ErrorCode::kInvalidArgument, "a process set needs different ranks between 0 and " +
                                           std::to_string(world_size_ - 1) + "; got " +
                                           text_of(wanted)};
}

SetId SetTable::open(std::vector<Rank> ranks) {
  auto set = std::make_unique<SetState>();
  const int members = static_cast<int>(ranks.size());
  set->id = next_++;
  set->ranks = std::move(ranks);
  set->joined = MemberMask(members);
  set->left = MemberMask(members);
  set->cycle = Cycle(repeats_);
  for (int m = 0; m < members; ++m) {  // somebody may have left while the set was asked for
    if (left_.contains(set->rank_of(m))) set->left.insert(m);
  }
  const SetId id = set->id;
  sets_[id] = std::move(set);
  return id;
}

}  // namespace farandole
