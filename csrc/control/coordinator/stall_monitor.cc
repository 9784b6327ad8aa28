// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/stall_monitor.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr int64_t kAnswerNs = 1'500'000'000;     // for a rank's answer
constexpr int64_t kLongestLead = 2'000'000'000;  // between question and giving up
constexpr size_t kMaxReports = 20;               // failures with causes and stacks

}  // namespace

StallMonitor::StallMonitor(const CoordinatorSettings& settings, SetTable& sets, OpenCalls& calls,
                           PostTable& posts, Outbox& outbox)
    : settings_(settings),
      sets_(sets),
      calls_(calls),
      posts_(posts),
      outbox_(outbox),
      heard_ns_(static_cast<size_t>(settings.size), -1) {}

// Age at which a call's missing ranks are asked: at the warning, or shortly before it is given up.
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
  view.made_before = calls_.registry().at(call.id())->published;
  view.group = call.request().group;
  for (int m : call.terms().outspoken(call.arrived())) view.here.push_back(set.rank_of(m));
  for (int m : call.arrived().missing()) view.missing.push_back(set.rank_of(m));
  if (call.times().first_member >= 0) {
    view.first = set.rank_of(call.times().first_member);
    view.last = set.rank_of(call.times().last_member);
  }
  view.since_ns = call.times().since_ns;
  view.last_ns = call.times().last_ns;
  return view;
}

WaitingCall StallMonitor::view_of(const Posted& posted) const {
  WaitingCall view;
  view.what = text_of(posted);
  view.name = posted.request().name;
  view.here = {posted.rank};
  const Rank peer = posted.request().peer;
  for (Rank rank : sets_.at(posted.request().set).ranks) {
    const bool wanted = peer == kAnyRank ? rank != posted.rank : rank == peer;
    if (wanted) view.missing.push_back(rank);
  }
  view.end = posted.request().signature.traits().end;
  view.tag = posted.request().tag;
  view.first = view.last = posted.rank;
  view.since_ns = view.last_ns = posted.since_ns;
  return view;
}

// A bucket in flight, some of whose members may have stopped.
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

// While a new question is open, a rank's answer to the previous one still counts.
const StackReport* StallMonitor::answer_of(Rank rank) const {
  if (auto found = answers_.find(rank); found != answers_.end()) return &found->second;
  if (!question_open_ || heard_ns_[static_cast<size_t>(rank)] >= earlier_ns_) return nullptr;
  auto earlier = earlier_answers_.find(rank);
  return earlier == earlier_answers_.end() ? nullptr : &earlier->second;
}

// From the last question, unless the rank has made a call since.
RankState StallMonitor::state_of(Rank rank) const {
  RankState state;
  state.heard_ns = heard_ns_[static_cast<size_t>(rank)];
  if (!questioned_.contains(rank) || question_ns_ <= state.heard_ns) return state;
  const StackReport* answer = answer_of(rank);
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
  for (auto& [id, set] : sets_.known()) {
    for (const Call* call : calls_.waiting(*set)) {
      if (now_ns - call->times().since_ns >= age_ns) views.push_back(view_of(*set, *call));
    }
  }
  posts_.for_each([&](const Posted& posted) {
    if (now_ns - posted.since_ns >= age_ns) views.push_back(view_of(posted));
  });
  for (auto& [id, set] : sets_) {
    if (set->host.moving() && now_ns - set->host.moving_since_ns >= age_ns) {
      views.push_back(view_of_bucket(*set));
    }
  }
  std::ranges::stable_sort(views, {}, &WaitingCall::since_ns);
  return views;
}

// Calls that ranks wait in, or did until recently: of calls that block each other, one is given up first.
std::vector<WaitingCall> StallMonitor::all_waiting(int64_t now_ns) {
  std::erase_if(lost_, [&](const auto& lost) { return now_ns - lost.first > kAnswerNs; });
  std::vector<WaitingCall> all = waiting_for(0, now_ns);
  for (const auto& [when, view] : lost_) all.push_back(view);
  return all;
}

// Gives up overdue calls with their whole groups, because a group can't complete without them.
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

void StallMonitor::give_up_posts(int64_t now_ns) {
  const std::vector<WaitingCall> all = all_waiting(now_ns);
  size_t reports = 0;
  posts_.fail_if([&](const Posted& posted) -> Failure {
    if (now_ns - posted.since_ns < settings_.stall_abort_ns) return {};
    WaitingCall view = view_of(posted);
    std::string text = "no progress: " + line_of(view, now_ns);
    if (reports++ < kMaxReports) text += causes_of({view}, all, states(), now_ns);
    lost_.emplace_back(now_ns, std::move(view));
    return {ErrorCode::kStall, text + "\n  (FARANDOLE_STALL_ABORT sets this limit)"};
  });
}

// A bucket can't be withdrawn, so its stall ends the job; but only if a member is known to be stopped or
// silent, because a machine may just be slow.
Failure StallMonitor::standing(const SetState& set, int64_t now_ns) const {
  if (!set.host.moving() || now_ns - set.host.moving_since_ns < settings_.stall_abort_ns) return {};
  const WaitingCall view = view_of_bucket(set);
  if (view.missing.empty()) return {};
  return {ErrorCode::kStall, "no progress: " + line_of(view, now_ns) +
                                 causes_of({view}, {view}, states(), now_ns) +
                                 "\n  (FARANDOLE_STALL_ABORT sets this limit)"};
}

void StallMonitor::ask(const std::vector<WaitingCall>& calls, int64_t now_ns) {
  questioned_.clear();
  earlier_answers_ = std::exchange(answers_, {});
  earlier_ns_ = question_ns_;
  for (const WaitingCall& call : calls)
    questioned_.insert(call.missing.begin(), call.missing.end());
  for (auto& [id, set] : sets_) {
    if (set->host.moving()) questioned_.insert(set->ranks.begin(), set->ranks.end());
  }
  question_ns_ = now_ns;
  question_open_ = true;
  next_question_ns_ = now_ns + (settings_.stall_warn_ns > 0 ? settings_.stall_warn_ns : kAnswerNs);
  if (!questioned_.empty()) outbox_.write(CollectStacks{{questioned_.begin(), questioned_.end()}});
}

void StallMonitor::answered(Rank from, const StackReport& stack_report, int64_t now_ns) {
  if (!questioned_.contains(from)) return;
  answers_[from] = stack_report;
  if (question_open_ && answers_.size() == questioned_.size()) conclude(now_ns);
}

// All have answered, or time is up: warns, if calls still wait.
void StallMonitor::conclude(int64_t now_ns) {
  question_open_ = false;
  if (settings_.stall_warn_ns <= 0) return;
  const std::vector<WaitingCall> calls = waiting_for(settings_.stall_warn_ns, now_ns);
  if (calls.empty()) return;
  outbox_.notice(stall_report(calls, all_waiting(now_ns), states(), now_ns));
}

Failure StallMonitor::tick(int64_t now_ns) {
  next_tick_ns_ = kNever;
  if (settings_.stall_abort_ns > 0) give_up_posts(now_ns);
  for (auto& [id, set] : sets_) {
    if (settings_.stall_abort_ns <= 0) break;
    if (!is_pair(id)) give_up_stalled(*set, now_ns);
    if (Failure failure = standing(*set, now_ns)) return failure;
  }
  std::vector<WaitingCall> overdue = waiting_for(patience_ns(), now_ns);
  if (!overdue.empty() && now_ns >= next_question_ns_) ask(overdue, now_ns);
  const int64_t answer_by = question_ns_ + kAnswerNs;
  const bool all_answered = answers_.size() == questioned_.size();
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
  const bool of_calls = set && !inquire.join && !inquire.key.posted();
  for (Call* call : of_calls ? calls_.waiting(*set) : std::vector<Call*>{}) {
    const CallKey& key = call->key();
    if (key.name != inquire.key.name || key.sequence != inquire.key.sequence) continue;
    const WaitingCall view = view_of(*set, *call);
    text = line_of(view, now_ns) + causes_of({view}, all, states(), now_ns);
  }
  posts_.for_each([&](const Posted& posted) {
    if (posted.rank != inquire.key.poster || posted.post.number != inquire.key.sequence) return;
    const WaitingCall view = view_of(posted);
    text = line_of(view, now_ns) + causes_of({view}, all, states(), now_ns);
  });
  if (text.empty()) text = "all ranks have submitted it, and its bytes are under way";
  return text;
}

}  // namespace farandole
