// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/set_table.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/error.h"

namespace farandole {

Failure removed(SetId set) {
  return {ErrorCode::kInvalidArgument, "process set " + std::to_string(set) + " was removed"};
}

SetTable::SetTable(int world_size, int max_sets)
    : world_size_(world_size), max_sets_(max_sets), left_(world_size) {
  open(numbers_below(world_size));
}

SetState* SetTable::of(SetId id, Rank from) {
  SetState* found = find(id);
  if (!found && id > kWorldSet && id < next_) return nullptr;
  if (!found || found->member_of(from) < 0) {
    throw Error(ErrorCode::kInternal, "rank " + std::to_string(from) + " reported to process set " +
                                          std::to_string(id) + " without being a member");
  }
  return found;
}

SetState* SetTable::find(SetId id) {
  auto found = sets_.find(id);
  return found == sets_.end() ? nullptr : found->second.get();
}

Failure SetTable::fault_of(std::span<const int64_t> wanted, bool alike_allowed) const {
  bool ascending = std::ranges::adjacent_find(wanted, std::greater_equal<>()) == wanted.end();
  bool sound = !wanted.empty() && ascending && wanted.front() >= 0 && wanted.back() < world_size_;
  for (const auto& [id, set] : known()) {
    if (alike_allowed || !std::ranges::equal(set->ranks, wanted)) continue;
    return {ErrorCode::kInvalidArgument, "a process set of " + text_of_ranks(set->ranks) +
                                             " exists already, with id " + std::to_string(id)};
  }
  if (std::ranges::distance(known()) >= max_sets_) {
    return {ErrorCode::kInvalidArgument,
            "there are " + std::to_string(max_sets_) +
                " process sets already; remove one, or raise FARANDOLE_PROCESS_SETS"};
  }
  const std::vector<Rank> ranks(wanted.begin(), wanted.end());
  if (!sound) {
    return {ErrorCode::kInvalidArgument, "a process set needs distinct ranks between 0 and " +
                                             std::to_string(world_size_ - 1) + "; got " +
                                             text_of_ranks(ranks)};
  }
  const SetState& world = *sets_.at(kWorldSet);
  std::vector<Rank> gone, joined;
  for (Rank rank : ranks) {
    if (has_left(rank)) gone.push_back(rank);
    const bool waits =
        world.left.empty() && world.joined.contains(rank);  // after a leave, joins end
    if (waits) joined.push_back(rank);
  }
  if (!gone.empty()) {
    return {ErrorCode::kPeer, text_of_ranks(gone) +
                                  " finished normally and left, so a process set of " +
                                  text_of_ranks(ranks) + " can't be added"};
  }
  if (joined.empty()) return {};
  return {ErrorCode::kInvalidArgument,
          text_of_ranks(joined) +
              " joined, and can't be in a new process set until join() returns: "
              "add sets before join(), or without the joined ranks"};
}

SetId SetTable::open(std::vector<Rank> ranks) { return add(next_++, std::move(ranks)).id; }

SetState& SetTable::pair(Rank a, Rank b, Outbox& outbox) {
  const auto [found, fresh] =
      pairs_.try_emplace(std::minmax(a, b), -1 - static_cast<SetId>(pairs_.size()));
  if (!fresh) return at(found->second);
  SetState& pair = add(found->second, {found->first.first, found->first.second});
  outbox.write(OpenSet{pair.id, pair.ranks, {}});
  return pair;
}

SetState& SetTable::add(SetId id, std::vector<Rank> ranks) {
  auto set = std::make_unique<SetState>();
  const int members = static_cast<int>(ranks.size());
  set->id = id;
  set->ranks = std::move(ranks);
  set->joined = MemberMask(members);
  set->left = MemberMask(members);
  for (int m = 0; m < members; ++m) {  // a rank may have left while the set was being requested
    if (left_.contains(set->rank_of(m))) set->left.insert(m);
  }
  return *(sets_[id] = std::move(set));
}

}  // namespace farandole
