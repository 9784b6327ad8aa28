// SPDX-License-Identifier: Apache-2.0
// The coordinator's process sets: opened, joined, left, removed.
#include <algorithm>
#include <functional>
#include <limits>
#include <utility>

#include "base/error.h"
#include "control/coordinator/coordinator.h"
#include "control/coordinator/open_bundle.h"

namespace farandole {

void Coordinator::open_set(SetId id, std::vector<Rank> ranks) {
  auto set = std::make_unique<Set>();
  int members = static_cast<int>(ranks.size());
  set->id = id;
  set->ranks = std::move(ranks);
  set->joined = MemberMask(members);
  set->left = MemberMask(members);
  set->cycle = Cycle(settings_.repeats);
  for (int m = 0; m < members; ++m) {  // somebody may have left while the set was asked for
    if (left_.contains(set->ranks[static_cast<size_t>(m)])) set->left.insert(m);
  }
  sets_[id] = std::move(set);
}

void Coordinator::add_set(const CallKey& key, std::span<const int64_t> wanted) {
  bool ascending = std::ranges::adjacent_find(wanted, std::greater_equal<>()) == wanted.end();
  bool sound =
      !wanted.empty() && ascending && wanted.front() >= 0 && wanted.back() < settings_.size;
  std::string fault;
  if (!sound) {
    fault = "a process set needs different ranks between 0 and " +
            std::to_string(settings_.size - 1) + "; got " + text_of(wanted);
  }
  if (sets_.size() >= static_cast<size_t>(settings_.max_sets)) {
    fault = "there are " + std::to_string(settings_.max_sets) +
            " process sets already; remove one, or raise FARANDOLE_PROCESS_SETS";
  }
  for (auto& [id, set] : sets_) {
    if (!std::ranges::equal(set->ranks, wanted)) continue;
    fault = "a process set of " + text_of_ranks(set->ranks) + " exists already, with id " +
            std::to_string(id);
  }
  if (!fault.empty()) {
    log_.push_back(Fail{key, {ErrorCode::kInvalidArgument, fault}});
    return;
  }
  std::vector<Rank> ranks(wanted.begin(), wanted.end());
  SetId id = next_set_++;
  open_set(id, ranks);
  log_.push_back(OpenSet{id, std::move(ranks), key});
}

void Coordinator::remove_set(const CallKey& key, SetId id) {
  auto found = id == kWorldSet ? sets_.end() : sets_.find(id);
  if (found == sets_.end()) {
    log_.push_back(Fail{
        key,
        {ErrorCode::kInvalidArgument, "process set " + std::to_string(id) + " can't be removed"}});
    return;
  }
  Failure failure{ErrorCode::kInvalidArgument,
                  "process set " + std::to_string(id) + " was removed while calls were under way"};
  unbundle_all(*found->second, 0);
  for (Call* call : open_calls(*found->second)) fail(*call, failure);
  sets_.erase(found);
  log_.push_back(CloseSet{id, key});
}

void Coordinator::on(Rank from, const Join& join, int64_t now_ns) {
  Set* set = set_of(join.set, from);
  if (!set) return;
  unbundle_all(*set, now_ns);
  int member = member_of(*set, from);
  bool again = !set->joined.insert(member);
  // After somebody has left, joins end early, and the next one may come before that is known here.
  if (again && set->left.empty()) throw Error(ErrorCode::kInternal, "a rank joined twice");
  set->last_joined = from;
  for (Call* call : open_calls(*set)) {
    if (call->has_arrived(member)) continue;
    call->arrive_joined(member);
    settle(*set, *call);
  }
  if (!set->joined.full()) return;
  for (Call* call : waiting_calls(*set)) {
    give_up(*set, *call,
            {ErrorCode::kInvalidArgument,
             text_of(call->key(), call->request()) + ": group '" + call->request().group +
                 "' has fewer members than it says, and all ranks have joined"});
  }
  set->groups.clear();
}

// When all have joined, or can't any more. Not before the last call is out: ranks that return from
// join() would begin its name anew.
void Coordinator::end_join(Set& set) {
  bool over = set.joined.full() || (!set.joined.empty() && !set.left.empty());
  if (!over || !set.ready.empty() || !set.on_gpus.empty()) return;
  // The joined ranks have made fewer unnamed calls: all count on from here.
  log_.push_back(Joined{set.id, set.last_joined, set.first_unnamed + set.unnamed.size()});
  set.joined.clear();
}

Failure Coordinator::blame_leavers(const Set& set, const CallKey& key,
                                   const Request& request) const {
  std::vector<Rank> gone;
  for (int m : set.left.members()) gone.push_back(set.ranks[static_cast<size_t>(m)]);
  return {ErrorCode::kPeer,
          text_of_ranks(gone) + " finished normally and left, so " + text_of(key, request) +
              " can't complete; all ranks must make the same number of calls (uneven data: "
              "join(), or drop_last)"};
}

void Coordinator::on(Rank from, const Leave& leave, int64_t now_ns) {
  if (leave.failed) {
    return lose(from, {ErrorCode::kPeer, "rank " + std::to_string(from) + " left: " + leave.text});
  }
  left_.insert(from);
  for (auto& [id, set] : sets_) {
    int member = member_of(*set, from);
    if (broken_ || member < 0) continue;
    unbundle_all(*set, now_ns);
    set->left.insert(member);
    for (Call* call : waiting_calls(*set)) {
      give_up(*set, *call, blame_leavers(*set, call->key(), call->request()));
    }
    set->groups.clear();
  }
}

void Coordinator::on(Rank from, const Lost& lost, int64_t) { lose(from, lost.failure); }

void Coordinator::lose(Rank rank, Failure failure) {
  left_.insert(rank);
  if (broken_ || stopped_) return;
  broken_ = true;
  next_tick_ns_ = std::numeric_limits<int64_t>::max();
  log_.push_back(Abort{std::move(failure)});
}

}  // namespace farandole
