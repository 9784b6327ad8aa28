// SPDX-License-Identifier: Apache-2.0
// The windows of a program: what all ranks do next.
#include "runtime/simulation/planner.h"

#include <algorithm>

namespace farandole::simulation {

using Kind = Action::Kind;

void Planner::add_window() {
  double kind = random_.unit();
  if (kind < 0.12) return set_window();
  if (kind < 0.18 && open_.size() > 1) return removal_window();
  int chosen = random_.chance(0.5) ? 0 : random_.pick(open_);
  // A rank that is late for a join would take part in the next one.
  if (kind < 0.35 && !program_.late()) return join_window(chosen);
  if (kind < 0.45) return stall_window(chosen);
  if (kind < 0.65) return training_window(chosen);
  if (kind < 0.8) return calling_window(chosen);
  work_window(chosen);
}

void Planner::submit(Rank rank, const std::vector<int>& order) {
  std::vector<int> waits;
  const double batched = batched_share();
  for (int c : order) {
    if (!takes_part(c, rank)) continue;
    act(rank, {Kind::kSubmit, c, random_.chance(batched)});
    if (random_.chance(0.05)) act(rank, {Kind::kDuplicate, c});
    waits.push_back(c);
  }
  end_batch(rank);
  random_.shuffle(waits);
  if (random_.chance(0.5)) {
    for (int c : waits) act(rank, {Kind::kWait, c});
  }
  if (random_.chance(0.7)) act(rank, {Kind::kWaitAll});
}

// Of a rank's submissions in a window: none, some or most share a batch with the next.
double Planner::batched_share() {
  const double kind = random_.unit();
  return kind < 0.4 ? 0 : kind < 0.7 ? 0.3 : 0.9;
}

// What follows is no submission.
void Planner::end_batch(Rank rank) {
  auto& actions = program_.actions[static_cast<size_t>(rank)];
  for (auto action = actions.rbegin(); action != actions.rend(); ++action) {
    if (action->kind == Kind::kDuplicate) continue;
    action->more = false;
    return;
  }
}

void Planner::work_window(int of_set) {
  auto calls = new_calls(of_set, random_.between(1, large_ ? 6 : 12));
  group(calls);
  for (int c : calls) spoil(c);
  for (int c : new_messages(of_set, random_.between(1, 8), false)) {
    spoil_message(c);
    calls.push_back(c);
  }
  for (Rank r : set(of_set).ranks) submit(r, shuffled(calls));
}

void Planner::make_gradient(Request& request) {
  request.signature = {};
  request.signature.dtype = DType::kInt32;
  request.signature.shape = {random_.between(1, 4000)};
  if (random_.chance(0.3)) request.signature.reduce_op = ReduceOp::kAverage;
}

// The same tensors step after step, in an order that is mostly the same; now and then one is different.
void Planner::training_window(int of_set) {
  auto tensors = new_calls(of_set, random_.between(2, large_ ? 6 : 10));
  std::erase_if(tensors, [&](int c) { return call(c).request.name.empty(); });
  for (int c : tensors) {
    if (random_.chance(0.8)) make_gradient(call(c).request);
  }
  double odd = random_.chance(0.5) ? 0 : 0.03;
  bool one_by_one = random_.chance(0.2);  // somebody waits within a step
  for (int steps = random_.between(3, large_ ? 5 : 12); steps > 0; --steps) {
    std::vector<int> calls;
    for (int c : tensors) calls.push_back(new_call(of_set, call(c).request));
    for (int c : calls) {
      if (random_.chance(odd)) spoil(c);
    }
    for (Rank r : set(of_set).ranks) {
      auto order = random_.chance(0.3) ? shuffled(calls) : calls;
      if (one_by_one && random_.chance(0.3)) {
        submit(r, order);
      } else {
        submit_and_wait(r, order);
      }
    }
  }
}

// Calls whose callers wait, one after the other and the same again: members complete those that they know in a cell.
void Planner::calling_window(int of_set) {
  const auto tensors = new_calls(of_set, random_.between(1, 3));
  for (int c : tensors) {
    if (random_.chance(0.6)) make_gradient(call(c).request);
  }
  const double odd = random_.chance(0.5) ? 0 : 0.05;
  const double late = random_.chance(0.5) ? 0 : 0.1;
  all_ranks({Kind::kWaitAll, 1});
  for (int steps = random_.between(3, large_ ? 6 : 16); steps > 0; --steps) {
    for (int tensor : tensors) {
      const int c = new_call(of_set, call(tensor).request);
      if (random_.chance(odd)) spoil(c);
      for (Rank r : set(of_set).ranks) {
        if (random_.chance(late)) act(r, {Kind::kPause, random_.between(1, 3'000'000)});
        const bool submits = random_.chance(late / 2);
        act(r, {submits ? Kind::kSubmit : Kind::kCall, c});
        if (submits) act(r, {Kind::kWait, c});
      }
    }
  }
}

// Members run out of data at different times.
void Planner::join_window(int of_set) {
  auto calls = new_calls(of_set, random_.between(1, 8));
  for (int c : calls) call(c).joins = true;
  const auto& ranks = set(of_set).ranks;
  auto messages = new_messages(of_set, random_.between(1, 4), true);
  const size_t gone =
      random_.below(ranks.size());  // joins at once: others may wait for its messages
  cut_messages(messages, kPeerGone, static_cast<int>(gone));
  for (size_t m = 0; m < ranks.size(); ++m) {
    size_t count = m == gone && !messages.empty() ? 0 : random_.below(calls.size() + 1);
    std::vector<int> mine(calls.begin(), calls.begin() + static_cast<long>(count));
    for (size_t i = count; i < calls.size(); ++i) call(calls[i]).roles[m] = Role::kMissing;
    mine.insert(mine.end(), messages.begin(), messages.end());
    submit(ranks[m], shuffled(mine));
    act(ranks[m], {Kind::kJoin, of_set});
  }
}

// Some members come too late, or never; between two points where nobody waits for anything else.
void Planner::stall_window(int of_set) {
  const auto& ranks = set(of_set).ranks;
  if (ranks.size() < 2) return;
  auto calls = new_calls(of_set, random_.between(1, 4));
  group(calls);
  std::vector<bool> slow(ranks.size());
  for (size_t m = 0; m < ranks.size(); ++m) slow[m] = random_.chance(0.4);
  size_t prompt = random_.below(ranks.size());
  slow[(prompt + 1) % ranks.size()] = true;
  slow[prompt] = false;
  all_ranks({Kind::kWaitAll, 1});
  stalls_.insert(syncs_);
  all_ranks({Kind::kSync, syncs_++});
  auto messages = new_messages(of_set, random_.between(1, 3), true);
  cut_messages(messages, kStalled);
  for (int c : messages) {
    if (call(c).allowed == 0) call(c).allowed = kDone | kStalled;
  }
  for (size_t m = 0; m < ranks.size(); ++m) {
    if (!slow[m]) submit(ranks[m], messages);
  }
  if (random_.chance(0.5)) {
    come_at_the_last_moment(calls, ranks, slow);
  } else {
    come_too_late(calls, ranks, slow);
  }
  all_ranks({Kind::kSync, syncs_++});
}

void Planner::come_at_the_last_moment(const std::vector<int>& calls, const std::vector<Rank>& ranks,
                                      const std::vector<bool>& slow) {
  for (int c : calls) call(c).allowed = kDone | kStalled;
  for (size_t m = 0; m < ranks.size(); ++m) {
    int64_t pause = kAbortAfter + random_.between(-20'000, 20'000);
    if (slow[m]) act(ranks[m], {Kind::kPause, pause});
    submit_and_wait(ranks[m], shuffled(calls));
  }
}

void Planner::come_too_late(const std::vector<int>& calls, const std::vector<Rank>& ranks,
                            const std::vector<bool>& slow) {
  std::vector<int> late;  // an unnamed call must be made: it has its place in the order
  for (int c : calls) {
    call(c).allowed = kStalled;
    if (call(c).request.name.empty() || random_.chance(0.5)) late.push_back(c);
  }
  for (size_t m = 0; m < ranks.size(); ++m) {
    if (!slow[m]) submit_and_wait(ranks[m], shuffled(calls));
  }
  all_ranks({Kind::kSync, syncs_++});
  for (size_t m = 0; m < ranks.size(); ++m) {
    if (!slow[m]) continue;
    submit_and_wait(ranks[m], shuffled(late));
    for (int c : calls) {
      if (std::ranges::count(late, c) == 0) call(c).roles[m] = Role::kMissing;
    }
  }
}

void Planner::submit_and_wait(Rank rank, const std::vector<int>& order) {
  const double batched = batched_share();
  for (int c : order) {
    if (takes_part(c, rank)) act(rank, {Kind::kSubmit, c, random_.chance(batched)});
  }
  end_batch(rank);
  act(rank, {Kind::kWaitAll, 1});
}

void Planner::set_window() {
  std::vector<int64_t> ranks;
  double share = random_.unit();
  for (Rank r : set(0).ranks) {
    if (random_.chance(share)) ranks.push_back(r);
  }
  if (random_.chance(0.2)) {  // again
    const auto& known = set(random_.pick(open_)).ranks;
    ranks.assign(known.begin(), known.end());
  }
  if (random_.chance(0.1)) ranks.push_back(program_.settings.size);  // no such rank
  Request request{0, random_.chance(0.5) ? "add" : "", {}};
  request.signature.op = Op::kAddSet;
  request.signature.shape = ranks;
  int c = new_call(0, request);
  call(c).roles.assign(call(c).roles.size(), Role::kEmpty);
  bool known =
      std::ranges::any_of(open_, [&](int s) { return std::ranges::equal(set(s).ranks, ranks); });
  bool sound = !ranks.empty() && ranks.back() < program_.settings.size && !known &&
               std::cmp_less(open_.size(), program_.settings.max_sets);
  call(c).allowed = sound ? kDone : kInvalid;
  if (sound) {
    open_.push_back(static_cast<int>(program_.sets.size()));
    program_.sets.push_back({std::vector<Rank>(ranks.begin(), ranks.end()), c});
  }
  for (Rank r : set(0).ranks) submit_and_wait(r, {c});
}

// Some calls are under way in the set when it goes.
void Planner::removal_window() {
  int gone = open_[1 + random_.below(open_.size() - 1)];
  std::erase(open_, gone);
  all_ranks({Kind::kWaitAll, 1});
  auto calls = new_calls(gone, random_.between(0, 4));
  Request request{0, random_.chance(0.5) ? "remove" : "", {}};
  request.signature.op = Op::kRemoveSet;
  int c = new_call(0, request);
  for (int under_way : calls) {
    call(under_way).allowed = kDone | kInvalid;
    call(under_way).ended_by = c;
  }
  call(c).removes = gone;
  call(c).roles.assign(call(c).roles.size(), Role::kEmpty);
  call(c).allowed = kDone;
  auto messages = new_messages(gone, random_.between(1, 4), true);
  cut_messages(messages, kInvalid);
  for (int message : messages) {
    if (call(message).allowed == 0) call(message).allowed = kDone | kInvalid;
    call(message).ended_by = c;
  }
  for (Rank r : set(0).ranks) {
    std::vector<int> mine = reported_before_removal(r, calls);
    if (set(gone).member_of(r) >= 0) {
      for (int message : messages) mine.push_back(message);
    }
    mine.insert(mine.begin() + static_cast<long>(random_.below(mine.size() + 1)), c);
    submit_and_wait(r, mine);
  }
}

// A member may leave out named calls: they can't be complete then.
std::vector<int> Planner::reported_before_removal(Rank rank, const std::vector<int>& calls) {
  std::vector<int> mine;
  if (calls.empty()) return mine;
  int member = set(call(calls[0]).set).member_of(rank);
  if (member < 0) return mine;
  for (int c : shuffled(calls)) {
    if (call(c).request.name.empty() || random_.chance(0.7)) {
      mine.push_back(c);
    } else {
      call(c).roles[static_cast<size_t>(member)] = Role::kMissing;
      call(c).allowed = kInvalid;
    }
  }
  return mine;
}

void Planner::interrupt() {
  auto& actions = program_.actions[random_.below(program_.actions.size())];
  constexpr Kind kEnds[] = {Kind::kLeave, Kind::kLeave, Kind::kFail, Kind::kDie};
  Kind end = kEnds[random_.below(4)];
  if (messages_ && end == Kind::kLeave) end = Kind::kFail;
  size_t cut = random_.below(actions.size() + 1);
  if (end == Kind::kLeave) {  // not within a stall: the others would be out of step
    bool inside = false;
    for (size_t i = 0; i < cut || inside; ++i) {
      if (actions[i].kind == Kind::kSync) inside = !ends_stall(actions[i].value);
      cut = std::max(cut, i + 1);
    }
  }
  actions.resize(cut);
  actions.push_back({end});
}

}  // namespace farandole::simulation
