// SPDX-License-Identifier: Apache-2.0
// Calls that wait for a rank: warned about, and given up in the end.
#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "control/coordinator.h"
#include "core/error.h"

namespace farandole {
namespace {

constexpr int kMaxLines = 20;  // of one notice

}  // namespace

std::vector<Call*> Coordinator::waiting_calls(Set& set) {
  std::vector<Call*> calls = open_calls(set);
  std::erase_if(calls, [](Call* call) { return call->is_queued() || call->given_up(); });
  return calls;
}

// A named call starts afresh when it comes again. An unnamed one keeps its place in the order.
void Coordinator::give_up(Set& set, Call& call, const Failure& failure) {
  std::vector<Rank> unheard;
  for (int m : call.arrived().missing()) unheard.push_back(set.ranks[static_cast<size_t>(m)]);
  log_.push_back(Fail{call.key(), failure, std::move(unheard)});
  if (call.key().named() || call.complete()) {
    retire(call);
  } else {
    call.give_up(failure);
  }
}

// The tick that this call needs next: to be warned about again, or to be given up.
void Coordinator::expect_progress(const Call& call, int64_t now_ns) {
  auto expect = [&](int64_t time) { next_tick_ns_ = std::min(next_tick_ns_, time); };
  if (int64_t period = settings_.stall_warn_ns; period > 0) {
    expect(call.since_ns() + period * ((now_ns - call.since_ns()) / period + 1));
  }
  if (settings_.stall_abort_ns > 0) expect(call.since_ns() + settings_.stall_abort_ns);
}

std::string Coordinator::stall_text(const Set& set, const Call& call, int64_t now_ns) const {
  std::vector<Rank> waiting;
  std::vector<Rank> missing;
  for (int m : call.arrived().members()) {
    if (!set.joined.contains(m)) waiting.push_back(set.ranks[static_cast<size_t>(m)]);
  }
  for (int m : call.arrived().missing()) missing.push_back(set.ranks[static_cast<size_t>(m)]);
  std::string text = text_of(call.key(), call.request()) + ": " + text_of_ranks(waiting) +
                     " waiting for " + std::to_string((now_ns - call.since_ns()) / 1'000'000'000) +
                     " s, ";
  if (missing.empty()) return text + "for the rest of group '" + call.request().group + "'";
  return text + text_of_ranks(missing) + " missing";
}

// With a call its whole group: no member of it can ever be done.
void Coordinator::give_up_stalled(Set& set, int64_t now_ns) {
  std::vector<Call*> calls = waiting_calls(set);
  auto too_old = [&](const Call* call) {
    return now_ns - call->since_ns() >= settings_.stall_abort_ns;
  };
  std::set<std::string> groups;
  for (const Call* call : calls) {
    if (!too_old(call)) continue;
    for (const auto& group : call->groups()) groups.insert(group.name);
  }
  for (Call* call : calls) {
    auto terms = call->groups();
    bool bound = std::ranges::any_of(terms, [&](auto& t) { return groups.contains(t.name); });
    if (!bound && !too_old(call)) continue;
    give_up(
        set, *call,
        {ErrorCode::kStall, "no progress: " + stall_text(set, *call, now_ns) +
                                "; the missing ranks run other code, have no more data (join(), or "
                                "drop_last), or hang (FARANDOLE_STALL_ABORT sets this limit)"});
  }
  for (const std::string& name : groups) set.groups.erase(name);
}

void Coordinator::tick(int64_t now_ns) {
  if (now_ns < next_tick_ns_ || broken_) return;
  next_tick_ns_ = std::numeric_limits<int64_t>::max();
  std::string lines;
  int stalled = 0;
  for (auto& [id, set] : sets_) {
    if (settings_.stall_abort_ns > 0) give_up_stalled(*set, now_ns);
    for (Call* call : waiting_calls(*set)) {
      expect_progress(*call, now_ns);
      bool long_ago = now_ns - call->since_ns() >= settings_.stall_warn_ns;
      if (settings_.stall_warn_ns <= 0 || !long_ago) continue;
      if (++stalled <= kMaxLines) lines += "\n  " + stall_text(*set, *call, now_ns);
    }
  }
  if (stalled > kMaxLines) lines += "\n  and " + std::to_string(stalled - kMaxLines) + " more";
  if (stalled > 0) notices_.push_back("some ranks wait for others:" + lines);
}

std::vector<std::string> Coordinator::take_notices() { return std::exchange(notices_, {}); }

}  // namespace farandole
