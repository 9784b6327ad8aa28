// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/stall_monitor.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr int64_t kAnswerNs = 1'500'000'000;     // that a rank may take to say where it is
constexpr int64_t kLongestLead = 2'000'000'000;  // from a question to the end of a call
constexpr size_t kMaxReports = 20;               // failures that carry the causes and the stacks

}  // namespace

StallMonitor::StallMonitor(const CoordinatorSettings& settings, SetTable& sets, OpenCalls& calls,
                           Outbox& outbox)
    : settings_(settings),
      sets_(sets),
      calls_(calls),
      outbox_(outbox),
      heard_ns_(static_cast<size_t>(settings.size), -1) {}

// How old a call is when its missing ranks are asked: at the warning, or a moment before its end.
int64_t StallMonitor::patience_ns() const {
  int64_t patience = settings_.stall_warn_ns > 0 ? settings_.stall_warn_ns : kNever;
  if (int64_t abort = settings_.stall_abort_ns; abort > 0) {
    patience = std::min(patience, abort - std::min(abort / 4, kLongestLead));
  }
  return patience;
}

void StallMonitor::expect_progress(int64_t since_ns, int64_t now_ns) {
  auto expect = [&](int64_t limit) {
    if (limit == kNever || limit <= 0 || since_ns + limit <= now_ns) return;
    next_tick_ns_ = std::min(next_tick_ns_, since_ns + limit);
  };
  expect(patience_ns());
  expect(settings_.stall_abort_ns);
}

WaitingCall StallMonitor::view_of(const SetState& set, const Call& call) const {
  WaitingCall view;
  view.what = text_of(call.key(), call.request());
  view.name = call.key().name;
  view.group = call.request().group;
  for (int m : call.arrived().members()) {
    if (!set.joined.contains(m)) view.here.push_back(set.rank_of(m));
  }
  for (int m : call.arrived().missing()) view.missing.push_back(set.rank_of(m));
  if (call.times().first_member >= 0) {
    view.first = set.rank_of(call.times().first_member);
    view.last = set.rank_of(call.times().last_member);
  }
  view.since_ns = call.times().since_ns;
  view.last_ns = call.times().last_ns;
  return view;
}

// Its bytes are under way, and some member may have stopped moving them.
WaitingCall StallMonitor::view_of_bucket(const SetState& set) const {
  WaitingCall view;
  view.what =
      "bucket " + std::to_string(set.host.done + 1) + " of process set " + std::to_string(set.id);
  view.moving = true;
  view.since_ns = view.last_ns = set.host.moving_since_ns;
  for (Rank rank : set.ranks) {
    const RankState state = state_of(rank);
    if (state.silent || state.stopped) view.missing.push_back(rank);
  }
  return view;
}

// Who was asked again just now is not silent yet: its answer to the question before counts.
const Whereabouts* StallMonitor::answer_of(Rank rank) const {
  if (auto found = answers_.find(rank); found != answers_.end()) return &found->second;
  if (!question_open_ || heard_ns_[static_cast<size_t>(rank)] >= earlier_ns_) return nullptr;
  auto earlier = earlier_answers_.find(rank);
  return earlier == earlier_answers_.end() ? nullptr : &earlier->second;
}

// What the last question has brought, unless the rank has gone on since.
RankState StallMonitor::state_of(Rank rank) const {
  RankState state;
  state.heard_ns = heard_ns_[static_cast<size_t>(rank)];
  if (!asked_.contains(rank) || asked_ns_ <= state.heard_ns) return state;
  const Whereabouts* answer = answer_of(rank);
  state.silent = answer == nullptr;
  if (state.silent) return state;
  state.stopped = answer->stopped;
  state.where = answer->text;
  return state;
}

StateOf StallMonitor::states() const {
  return [this](Rank rank) { return state_of(rank); };
}

std::vector<WaitingCall> StallMonitor::waiting_for(int64_t age_ns, int64_t now_ns) {
  std::vector<WaitingCall> views;
  for (auto& [id, set] : sets_) {
    for (const Call* call : calls_.waiting(*set)) {
      if (now_ns - call->times().since_ns >= age_ns) views.push_back(view_of(*set, *call));
    }
    if (set->host.moving() && now_ns - set->host.moving_since_ns >= age_ns) {
      views.push_back(view_of_bucket(*set));
    }
  }
  std::ranges::stable_sort(views, {}, &WaitingCall::since_ns);
  return views;
}

// What ranks wait in, or did a moment ago: calls that block each other are not given up at once.
std::vector<WaitingCall> StallMonitor::all_waiting(int64_t now_ns) {
  std::erase_if(lost_, [&](const auto& lost) { return now_ns - lost.first > kAnswerNs; });
  std::vector<WaitingCall> all = waiting_for(0, now_ns);
  for (const auto& [when, view] : lost_) all.push_back(view);
  return all;
}

// With a call its whole group: no member of it can ever be done.
void StallMonitor::give_up_stalled(SetState& set, int64_t now_ns) {
  std::vector<Call*> calls = calls_.waiting(set);
  auto too_old = [&](const Call* call) {
    return now_ns - call->times().since_ns >= settings_.stall_abort_ns;
  };
  std::set<std::string> groups;
  for (const Call* call : calls) {
    if (!too_old(call)) continue;
    for (const auto& group : call->terms().groups()) groups.insert(group.name);
  }
  std::vector<std::pair<Call*, WaitingCall>> lost;
  for (Call* call : calls) {
    auto terms = call->terms().groups();
    bool bound = std::ranges::any_of(terms, [&](auto& t) { return groups.contains(t.name); });
    if (bound || too_old(call)) lost.emplace_back(call, view_of(set, *call));
  }
  if (lost.empty()) return;
  const std::vector<WaitingCall> all = all_waiting(now_ns);
  size_t reports = 0;
  for (auto& [call, view] : lost) {
    std::string text = "no progress: " + line_of(view, now_ns);
    if (reports++ < kMaxReports) text += causes_of({view}, all, states(), now_ns);
    calls_.give_up(set, *call,
                   {ErrorCode::kStall, text + "\n  (FARANDOLE_STALL_ABORT sets this limit)"});
    lost_.emplace_back(now_ns, std::move(view));
  }
  for (const std::string& name : groups) set.groups.erase(name);
  std::erase_if(set.broken, [](const BrokenGroup& group) { return !group.first->is_open(); });
}

// A bucket can't be taken back. Its end is the job's, and only if a member is known to stand still: a
// slow machine is no reason.
Failure StallMonitor::standing(const SetState& set, int64_t now_ns) const {
  if (!set.host.moving() || now_ns - set.host.moving_since_ns < settings_.stall_abort_ns) return {};
  const WaitingCall view = view_of_bucket(set);
  if (view.missing.empty()) return {};
  return {ErrorCode::kStall, "no progress: " + line_of(view, now_ns) +
                                 causes_of({view}, {view}, states(), now_ns) +
                                 "\n  (FARANDOLE_STALL_ABORT sets this limit)"};
}

void StallMonitor::ask(const std::vector<WaitingCall>& calls, int64_t now_ns) {
  asked_.clear();
  earlier_answers_ = std::exchange(answers_, {});
  earlier_ns_ = asked_ns_;
  for (const WaitingCall& call : calls) asked_.insert(call.missing.begin(), call.missing.end());
  for (auto& [id, set] : sets_) {
    if (set->host.moving()) asked_.insert(set->ranks.begin(), set->ranks.end());
  }
  asked_ns_ = now_ns;
  question_open_ = true;
  next_question_ns_ = now_ns + (settings_.stall_warn_ns > 0 ? settings_.stall_warn_ns : kAnswerNs);
  if (!asked_.empty()) outbox_.write(WhereAre{{asked_.begin(), asked_.end()}});
}

void StallMonitor::answered(Rank from, const Whereabouts& whereabouts, int64_t now_ns) {
  if (!asked_.contains(from)) return;
  answers_[from] = whereabouts;
  if (question_open_ && answers_.size() == asked_.size()) conclude(now_ns);
}

// All have answered, or time is up: people read about it, if it is still so.
void StallMonitor::conclude(int64_t now_ns) {
  question_open_ = false;
  if (settings_.stall_warn_ns <= 0) return;
  const std::vector<WaitingCall> calls = waiting_for(settings_.stall_warn_ns, now_ns);
  if (calls.empty()) return;
  outbox_.notice(stall_report(calls, all_waiting(now_ns), states(), now_ns));
}

Failure StallMonitor::tick(int64_t now_ns) {
  next_tick_ns_ = kNever;
  for (auto& [id, set] : sets_) {
    if (settings_.stall_abort_ns <= 0) break;
    give_up_stalled(*set, now_ns);
    if (Failure failure = standing(*set, now_ns)) return failure;
  }
  std::vector<WaitingCall> overdue = waiting_for(patience_ns(), now_ns);
  if (!overdue.empty() && now_ns >= next_question_ns_) ask(overdue, now_ns);
  const int64_t answer_by = asked_ns_ + kAnswerNs;
  const bool all_answered = answers_.size() == asked_.size();
  if (question_open_ && (all_answered || now_ns >= answer_by)) conclude(now_ns);

  if (question_open_) next_tick_ns_ = answer_by;
  if (!overdue.empty()) next_tick_ns_ = std::min(next_tick_ns_, next_question_ns_);
  for (const WaitingCall& call : waiting_for(0, now_ns)) expect_progress(call.since_ns, now_ns);
  return {};
}

std::string StallMonitor::explain(SetState* set, const Inquire& inquire, int64_t now_ns) {
  std::string text;
  if (set && inquire.join) {
    std::vector<Rank> missing;
    for (int m : set->joined.missing()) missing.push_back(set->rank_of(m));
    text = text_of_ranks(missing) + " not joined yet";
  }
  const std::vector<WaitingCall> all = all_waiting(now_ns);
  for (Call* call : set && !inquire.join ? calls_.waiting(*set) : std::vector<Call*>{}) {
    const CallKey& key = call->key();
    if (key.name != inquire.key.name || key.sequence != inquire.key.sequence) continue;
    const WaitingCall view = view_of(*set, *call);
    text = line_of(view, now_ns) + causes_of({view}, all, states(), now_ns);
  }
  if (text.empty()) text = "all ranks have submitted it, and its bytes are under way";
  return text;
}

}  // namespace farandole
