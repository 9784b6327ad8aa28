// SPDX-License-Identifier: Apache-2.0
// What the log does to a virtual rank.
#include <algorithm>
#include <utility>

#include "check.h"
#include "control/simulator/simulator.h"

namespace farandole::simulation {
namespace {

uint8_t outcome_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kMismatch: return kMismatched;
    case ErrorCode::kInvalidArgument: return kInvalid;
    case ErrorCode::kWrongType: return kRefused;
    case ErrorCode::kPeer: return kPeerGone;
    case ErrorCode::kStall: return kStalled;
    default: return 0;
  }
}

}  // namespace

void VirtualRank::read(const Entry& entry) {
  if (stopped_) fail("the log goes on after it stopped");
  std::visit([this](const auto& e) { on(e); }, entry);
}

void VirtualRank::on(const Define& define) {
  if (by_id_.size() <= define.id) by_id_.resize(define.id + 1);
  const Request*& known = by_id_[define.id];
  bool again = known && !known->name.empty() && known->set == define.request.set &&
               known->name == define.request.name;
  if (known && !again) fail("id " + std::to_string(define.id) + " would mean two things");
  known = &define.request;
  if (known->name.empty()) {
    interned_[bytes_of(*known)] = define.id;
  } else {
    name_of(known->set, known->name).id = define.id;
  }
}

void VirtualRank::on(const Forget& forget) {
  if (forget.id >= by_id_.size() || !by_id_[forget.id]) fail("an unknown id is forgotten");
  const Request& request = *by_id_[forget.id];
  if (request.name.empty()) {
    interned_.erase(bytes_of(request));
  } else {
    Name& name = name_of(request.set, request.name);
    if (name.id == forget.id) name.id = 0;
  }
  by_id_[forget.id] = nullptr;
  report(Forgot{forget.id});
}

int VirtualRank::take(const CallKey& key) {
  if (key.named()) {
    Name& name = name_of(key.set, key.name);
    if (!std::exchange(name.reported, false)) return -1;
    name.refused.swap(name.refused_since);
    return name.call;
  }
  if (!sets_.contains(key.set)) return -1;  // of other ranks, or made after this one has left
  auto& waiting = sets_.at(key.set).unnamed.waiting;
  auto found = waiting.find(key.sequence);
  if (found == waiting.end()) return -1;
  int call = found->second;
  waiting.erase(found);
  return call;
}

int VirtualRank::take(uint32_t id, uint64_t sequence) {
  if (id >= by_id_.size() || !by_id_[id]) fail("the log names an id that it has not defined");
  const Request& request = *by_id_[id];
  int call = take(CallKey{request.set, request.name, sequence});
  if (call >= 0) {
    const PlannedCall& mine = planned(call);
    int member = program_.sets[static_cast<size_t>(mine.set)].member_of(rank_);
    const Request& meant = mine.request_of(member);
    if (!same_terms(meant, request)) {
      fail("call " + std::to_string(call) + " is settled with another request than it made");
    }
  } else if (auto set = sets_.find(request.set); set != sets_.end() && !aborted_) {
    bool member = program_.sets[static_cast<size_t>(set->second.planned)].member_of(rank_) >= 0;
    if (member && !set->second.join_sent) {
      fail("a call is settled that it has not reported, though it has not joined");
    }
  }
  return call;
}

// The call is over: its name is free again.
void VirtualRank::end(int index, uint8_t outcome) {
  const PlannedCall& call = planned(index);
  uint8_t& known = outcomes_[static_cast<size_t>(index)];
  if (known != 0) fail("call " + std::to_string(index) + " ends twice");
  if ((call.allowed & outcome) == 0) {
    fail("call " + std::to_string(index) + " '" + call.request.name + "' in planned set " +
         std::to_string(call.set) + " ends with outcome " + std::to_string(outcome) + ", allowed " +
         std::to_string(call.allowed));
  }
  known = outcome;
  --in_flight_;
  refused_.erase(index);
  auto id = ids_.find(call.set);
  if (id == ids_.end() || call.request.name.empty()) return;
  Name& name = name_of(id->second, call.request.name);
  if (name.call == index) name.call = -1;
}

void VirtualRank::take_item(const Run& run, const Item& item, std::vector<int>& calls) {
  int call = take(item.id, item.sequence);
  if (call < 0) return;
  calls.push_back(call);
  world_.settled(call, run, item);
}

void VirtualRank::on(const Run& run) {
  std::vector<int> calls;
  auto found = sets_.find(run.set);
  if (found == sets_.end()) return;
  OpenedSet& set = found->second;
  const PlannedSet& planned_set = program_.sets[static_cast<size_t>(set.planned)];
  if (planned_set.member_of(rank_) < 0) return;
  for (const Item& item : run.items) take_item(run, item, calls);
  run.plain.for_each([&](uint32_t id) {
    if (id >= by_id_.size() || !by_id_[id]) fail("the log names an id that it has not defined");
    take_item(run, Item{id}, calls);
  });
  set.lane.emplace_back(run.bucket, std::move(calls));
  if (set.lane.size() == 1) world_.start_lane(rank_, run.set);
}

void VirtualRank::finish_bucket(SetId id) {
  OpenedSet& set = sets_.at(id);
  if (aborted_ || dead_) return;
  auto [bucket, calls] = std::move(set.lane.front());
  set.lane.pop_front();
  for (int call : calls) end(call, kDone);
  const auto& ranks =
      set.pair.empty() ? program_.sets[static_cast<size_t>(set.planned)].ranks : set.pair;
  bool lowest = ranks.front() == rank_;
  if (lowest) report(Done{id, bucket});
  if (!set.lane.empty()) world_.start_lane(rank_, id);
}

void VirtualRank::on(const Result& result) {
  int call = take(result.id, result.sequence);
  if (call < 0) return;
  bool barrier = by_id_[result.id]->signature.op == Op::kBarrier;
  world_.settled(call, result);
  end(call, result.absent && !barrier ? kAbsent : kDone);
}

void VirtualRank::on(const Fail& fail_entry) {
  for (Rank r : fail_entry.unheard) {
    if (r == rank_) return;
  }
  if (fail_entry.key.posted()) {
    auto node = fail_entry.key.poster == rank_ ? posted_.extract(fail_entry.key.sequence)
                                               : decltype(posted_)::node_type{};
    if (node) end(node.mapped(), outcome_of(fail_entry.failure.code));
    return;
  }
  if (!sets_.contains(fail_entry.key.set)) return;
  auto& refused = name_of(fail_entry.key.set, fail_entry.key.name).refused;
  if (fail_entry.key.named() && !refused.empty()) {
    const int first = refused.front();
    refused.pop_front();
    return end(first, outcome_of(fail_entry.failure.code));
  }
  int call = take(fail_entry.key);
  if (call >= 0) end(call, outcome_of(fail_entry.failure.code));
}

void VirtualRank::on(const Joined& joined) {
  auto found = sets_.find(joined.set);
  if (found == sets_.end()) return;  // made after this rank has left
  OpenedSet& set = found->second;
  set.join_sent = false;
  set.unnamed.next = std::max(set.unnamed.next, joined.next_sequence);
}

void VirtualRank::on(const Matched& matched) {
  const bool sends = matched.sender == rank_;
  if (!sends && matched.receiver != rank_) return;
  auto node = posted_.extract(sends ? matched.sent : matched.received);
  if (!node) fail("a post is matched that it has not made");
  sets_.at(matched.pair).unnamed.waiting[matched.sequence] = node.mapped();
  const PlannedCall& call = planned(node.mapped());
  const auto& ranks = program_.sets[static_cast<size_t>(call.set)].ranks;
  if (ranks[static_cast<size_t>(call.sender)] != matched.sender ||
      ranks[static_cast<size_t>(call.receiver)] != matched.receiver) {
    fail("a post meets another message's end");
  }
}

void VirtualRank::on(const OpenSet& open) {
  if (is_pair(open.set)) {
    if (std::ranges::count(open.ranks, rank_) > 0) sets_[open.set].pair = open.ranks;
    return;
  }
  int call = take(open.key);
  // The planned set is known by the call that adds it; a rank that left early has not made it.
  for (size_t s = 1; s < program_.sets.size(); ++s) {
    if (call < 0 || program_.sets[s].added_by != call) continue;
    if (program_.sets[s].ranks != open.ranks) fail("a set opens with other ranks");
    sets_[open.set].planned = static_cast<int>(s);
    ids_[static_cast<int>(s)] = open.set;
  }
  if (call >= 0) end(call, kDone);
}

void VirtualRank::on(const CloseSet& close) {
  auto found = sets_.find(close.set);
  if (found != sets_.end()) found->second.closed = true;
  int call = take(close.key);
  if (call >= 0) end(call, kDone);
}

void VirtualRank::on(const Abort&) {
  if (std::exchange(aborted_, true)) fail("the job is aborted twice");
  batch_.clear();
  for (size_t call = 0; call < outcomes_.size(); ++call) {
    bool in_flight = false;
    const PlannedCall& mine = planned(static_cast<int>(call));
    auto id = ids_.find(mine.set);
    if (id == ids_.end() || outcomes_[call] != 0) continue;
    if (!mine.request.name.empty()) {
      const Name& name = name_of(id->second, mine.request.name);
      const int index = static_cast<int>(call);
      in_flight = name.call == index || std::ranges::count(name.refused, index) > 0 ||
                  std::ranges::count(name.refused_since, index) > 0;
    }
    for (auto& [number, posted] : posted_) {
      in_flight = in_flight || posted == static_cast<int>(call);
    }
    for (auto& [opened, set] : sets_) {
      for (auto& [sequence, waiting] : set.unnamed.waiting) {
        in_flight = in_flight || waiting == static_cast<int>(call);
      }
      for (auto& [bucket, calls] : set.lane) {
        for (int c : calls) in_flight = in_flight || c == static_cast<int>(call);
      }
    }
    if (in_flight) end(static_cast<int>(call), kPeerGone);
  }
  posted_.clear();
  for (auto& [id, set] : sets_) {
    set.unnamed.waiting.clear();
    set.lane.clear();
  }
}

void VirtualRank::on(const Stop&) {
  stopped_ = true;
  if (!left_) fail("the log stops before this rank has left");
}

void VirtualRank::on(const CollectStacks& where) {
  if (std::ranges::count(where.ranks, rank_) == 0) return;
  world_.report(rank_, StackReport{false, "in a simulation"});
}

void VirtualRank::on(const Inform&) {}

// Of calls from different lines.
void VirtualRank::on(const Notice&) {}

// The simulated ranks have no GPUs.
void VirtualRank::on(const SetUp&) { fail("a GPU was opened"); }

bool VirtualRank::done() const {
  auto idle = [](const auto& set) { return set.second.lane.empty(); };
  return dead_ || (stopped_ && std::ranges::all_of(sets_, idle));
}

void VirtualRank::check_end() const {
  if (in_flight_ != 0) fail(std::to_string(in_flight_) + " calls never ended");
  for (const auto& [key, name] : names_) {
    if (name.call >= 0) fail("'" + key.second + "' is still in flight");
  }
}

}  // namespace farandole::simulation
