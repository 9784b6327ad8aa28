// SPDX-License-Identifier: Apache-2.0
// Reports of many ranks at once, as hosts' leaders send them: the daily ones cost a few words; the others
// are taken rank by rank.
#include <bit>
#include <utility>

#include "base/error.h"
#include "control/coordinator/coordinator.h"
#include "control/coordinator/open_bundle.h"

namespace farandole {

int Coordinator::add_group(std::vector<Rank> ranks) {
  groups_.push_back({std::move(ranks), {}});
  return static_cast<int>(groups_.size()) - 1;
}

void Coordinator::receive_all(int number, const Report& report, int64_t now_ns) {
  RankGroup& group = groups_.at(static_cast<size_t>(number));
  now_ns_ = now_ns;
  if (broken_) return;
  const auto* ready = std::get_if<Ready>(&report);
  const auto* bundle = std::get_if<ReadyAll>(&report);
  if (ready && on_all(group, *ready, now_ns)) return;
  if (bundle && on_all(group, *bundle, now_ns)) return;
  SetId id = kWorldSet;
  if (ready && registry_.at(ready->id)) id = registry_.at(ready->id)->request.set;
  if (bundle) id = bundle_of(bundle->bundle).set;
  auto set = sets_.find(id);
  for (Rank rank : group.ranks) {
    if (set == sets_.end() || member_of(*set->second, rank) >= 0) receive(rank, report, now_ns);
  }
}

bool Coordinator::on_all(RankGroup& group, const Ready& ready, int64_t now_ns) {
  const Contribution& given = ready.contribution;
  Definition* known = registry_.at(ready.id);
  bool plain = given.has_input && !given.has_payload && given.rows == 0 && given.splits.empty();
  if (!plain || ready.id == 0 || !known || known->forgetting || known->bundle) return false;
  auto found = sets_.find(known->request.set);
  if (found == sets_.end()) return false;
  Set& set = *found->second;
  if (!set.left.empty() || !set.joined.empty()) return false;
  const MemberSlice& members = group.slice_of(set.id, set.ranks);
  if (members.count == 0) return true;
  Call& call = find_call(set, *known, known->request, ready.sequence, now_ns);
  if (call.redefines() || call.id() != ready.id || call.given_up()) return false;
  if (!call.arrive_all(members)) return false;
  call.note(static_cast<int>(64 * members.first_word) + std::countr_zero(members.words.front()),
            now_ns);
  heard(group, now_ns);
  settle(set, call);
  return true;
}

bool Coordinator::on_all(RankGroup& group, const ReadyAll& ready, int64_t now_ns) {
  OpenBundle& bundle = bundle_of(ready.bundle);
  auto found = sets_.find(bundle.set);
  if (found == sets_.end() || bundle.closing || bundle.open > 0) return false;
  Set& set = *found->second;
  const MemberSlice& members = group.slice_of(set.id, set.ranks);
  if (members.count == 0) return true;
  begin_round(bundle, now_ns);
  if (!bundle.arrived.insert_all(members.first_word, members.words, members.count)) return false;
  heard(group, now_ns);
  complete_round(set, bundle);
  return true;
}

void Coordinator::heard(const RankGroup& group, int64_t now_ns) {
  for (Rank rank : group.ranks) heard_ns_[static_cast<size_t>(rank)] = now_ns;
}

}  // namespace farandole
