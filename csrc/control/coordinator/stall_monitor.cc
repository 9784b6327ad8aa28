// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/stall_monitor.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr size_t kMaxCalls = 20;  // number of calls in a warning
constexpr size_t kMaxRanks = 8;   // number of ranks in a warning whose stacks are shown

std::string tenths(int64_t ns) {
  const int64_t tenth = ns / 100'000'000;
  return std::to_string(tenth / 10) + "." + std::to_string(tenth % 10) + " s";
}

bool has(const std::vector<Rank>& ranks, Rank rank) { return std::ranges::count(ranks, rank) > 0; }

// Puts each line of `text` on a new line, indented by four blanks.
std::string indented(const std::string& text) {
  std::string result;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (end > at) result += "\n    " + text.substr(at, end - at);
    at = end + 1;
  }
  return result;
}

// Detects a deadlock: `call` waits for `rank`, and `rank` waits in a second call for a rank in call.here. Returns the
// second call, or null if there is none.
const WaitingCall* crossed(const WaitingCall& call, Rank rank,
                           const std::vector<WaitingCall>& all) {
  for (const WaitingCall& other : all) {
    if (other.moving || !has(other.here, rank)) continue;
    if (std::ranges::any_of(other.missing, [&](Rank r) { return has(call.here, r); }))
      return &other;
  }
  return nullptr;
}

constexpr int64_t kLongestLead = 2'000'000'000;  // time from asking for stacks to failing the call
// The job may end when a bucket's member has been silent for this long. On a loaded machine, even a healthy rank may
// answer late.
constexpr int64_t kGoneNs = 10'000'000'000;
constexpr int64_t kTickPauseNs = 100'000'000;  // least time between ticks for reported buckets
constexpr size_t kMaxReports = 20;             // number of failures that show stacks
constexpr uint64_t kNoSequence =
    std::numeric_limits<uint64_t>::max();  // for a join(), which has no number

std::string line_of(const WaitingCall& call, int64_t now_ns) {
  return line_of(CallGroup{&call}, now_ns);
}

bool waits_among(const WaitingCall& call, const std::map<Rank, const WaitingCall*>& ranks) {
  const auto known = [&](Rank rank) { return ranks.contains(rank); };
  return std::ranges::any_of(call.here, known) && std::ranges::any_of(call.missing, known);
}

bool same(const CallKey& a, const CallKey& b) {
  return a.set == b.set && a.name == b.name && a.sequence == b.sequence && a.poster == b.poster;
}

std::string frames_of(const std::string& stack) {
  std::string frames;
  std::istringstream lines(stack);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("  File ")) {
      frames += line + "\n";
    } else if (!frames.empty()) {
      break;
    }
  }
  return frames;
}

// Returns the part of a warning that stays the same until a rank makes progress: facts without digits, stack frames.
std::string kept_of(const std::string& facts, const std::string& stack) {
  std::string kept;
  std::ranges::copy_if(facts, std::back_inserter(kept), [](char c) { return c < '0' || c > '9'; });
  return kept + frames_of(stack);
}

}  // namespace

std::string StallMonitor::text_from(const std::vector<WarningPart>& parts) {
  std::string text;
  for (const WarningPart& part : parts) text += part.text;
  return text;
}

bool StallMonitor::is_silent(Rank rank, int64_t now_ns, int64_t for_ns) const {
  const RankState& state = state_of(rank);
  return state.owes_answer() && now_ns - state.asked_ns >= for_ns;
}

bool StallMonitor::is_stopped(Rank rank) const {
  const RankState& state = state_of(rank);
  return state.answered_ns > state.heard_ns && state.answer.stopped;
}

Rank StallMonitor::above(Rank rank) const {
  const std::vector<Rank>& above = shared_.settings.above;
  return above.empty() || rank == 0 ? 0 : above[static_cast<size_t>(rank)];
}

Rank StallMonitor::first_silent(Rank rank, int64_t now_ns) const {
  Rank first = rank;
  while ((rank = above(rank)) != 0) {
    if (is_silent(rank, now_ns)) first = rank;
  }
  return first;
}

bool StallMonitor::all_answered() const {
  return std::ranges::none_of(ranks_, &RankState::owes_answer);
}

SetId StallMonitor::joined_by(Rank rank) const {
  SetId joined = -1;
  for (const auto& [id, set] : std::as_const(shared_.sets).known()) {
    const int member = set->member_of(rank);
    if (member >= 0 && set->joined.contains(member)) joined = id;
  }
  return joined;
}

std::string StallMonitor::standing_of(Rank rank, const WaitingCall& call,
                                      const std::vector<WaitingCall>& all, int64_t now_ns) const {
  if (is_stopped(rank)) return "is stopped by a signal or a debugger";
  if (call.moving || is_silent(rank, now_ns)) {
    const Rank first = first_silent(rank, now_ns);
    if (first != rank) {
      return "can't be reached: rank " + std::to_string(first) +
             ", which forwards its reports, does not answer: it is stopped or gets no CPU time";
    }
    return "does not answer, not even from its background thread: it is frozen, swapped out, or "
           "gets no CPU time";
  }
  if (const SetId joined = joined_by(rank); joined >= 0) {
    return "waits in join() of process set " + std::to_string(joined) +
           ", but this call is in a different process set: let it join() that set first";
  }
  if (const WaitingCall* other = crossed(call, rank, all)) {
    return "waits in " + other->what + ", which " + text_of_ranks(other->missing) +
           (other->missing.size() == 1 ? " has" : " have") +
           " not called: make the same calls on all ranks, with the same names and tags, and "
           "blocking calls in the same order";
  }
  const auto& [heard_ns, asked_ns, answered_ns, answer] = state_of(rank);
  const bool heard_since = heard_ns > call.since_ns;
  if (!heard_since && answered_ns < call.since_ns) return {};  // it may have made calls in cells
  if (heard_ns < 0) {
    return "has made no call yet: it is starting, computes, hangs, or runs different code";
  }
  if (heard_since) {
    return "has made other calls since, the last " + tenths(now_ns - heard_ns) +
           " ago: it does not make this one (a condition in the model?)";
  }
  return "has made no call for " + tenths(now_ns - heard_ns) +
         ": it has run out of data (use join() or drop_last), computes, or hangs";
}

std::vector<StallMonitor::WarningPart> StallMonitor::missing_from(
    std::span<const WaitingCall> calls, const std::vector<WaitingCall>& all, int64_t now_ns) const {
  std::vector<WarningPart> parts;
  std::set<Rank> shown;
  for (const WaitingCall& call : calls) {
    for (Rank rank : call.missing) {
      if (shown.size() >= kMaxRanks || shown.contains(rank)) continue;
      const RankState& state = state_of(rank);
      const bool answered = state.answered_ns > state.heard_ns;
      std::string stack = answered ? state.answer.text : "";
      if (answered && state.answer.blocked) stack = frames_of(stack);
      const std::string facts = standing_of(rank, call, all, now_ns);
      if (facts.empty()) continue;
      shown.insert(rank);
      const std::string who = "\n  rank " + std::to_string(rank) + " ";
      parts.push_back({who + facts + indented(stack), who + kept_of(facts, stack)});
    }
  }
  return parts;
}

// Returns the age of a call at which the missing ranks are asked for their stacks. This is the age at which the warning
// is due or, if the call fails sooner, some time before it fails.
int64_t StallMonitor::patience_ns() const {
  int64_t patience = shared_.settings.stall_warn_ns > 0 ? shared_.settings.stall_warn_ns : kNever;
  if (int64_t abort = shared_.settings.stall_abort_ns; abort > 0) {
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
  expect(shared_.settings.stall_abort_ns);
}

WaitingCall StallMonitor::view_of(const SetState& set, const Call& call) const {
  WaitingCall view;
  view.what = text_of(call.key(), call.request());
  for (int m : call.terms().outspoken(call.arrived())) view.here.push_back(set.rank_of(m));
  for (int m : call.arrived().missing()) view.missing.push_back(set.rank_of(m));
  view.since_ns = call.since_ns();
  view.key = call.key();
  return view;
}

WaitingCall StallMonitor::view_of(const Posted& posted) const {
  WaitingCall view;
  view.what = text_of(posted);
  view.here = {posted.rank};
  const Rank peer = posted.request().peer;
  for (Rank rank : shared_.sets.at(posted.request().set).ranks) {
    const bool wanted = peer == kAnyRank ? rank != posted.rank : rank == peer;
    if (wanted) view.missing.push_back(rank);
  }
  view.since_ns = posted.since_ns;
  view.key = posted.key();
  return view;
}

// The age of a join counts from when the whole job came to rest, because the other ranks may have data for hours.
WaitingCall StallMonitor::view_of_join(const SetState& set, int64_t now_ns) const {
  WaitingCall view;
  view.what = "join() of process set " + std::to_string(set.id);
  for (int m : set.joined.members()) view.here.push_back(set.rank_of(m));
  for (int m : set.joined.missing()) view.missing.push_back(set.rank_of(m));
  const bool at_rest = under_way(now_ns).empty();
  view.since_ns = at_rest ? std::max(set.joined_since_ns, active_ns_) : now_ns;
  view.key = {set.id, {}, kNoSequence};
  return view;
}

std::vector<Rank> StallMonitor::members_of(const Stuck& stuck) const {
  return stuck.set == kWorldSet ? numbers_below(shared_.settings.size) : stuck.ranks;
}

void StallMonitor::stands_still(Rank from, const Stuck& stuck, int64_t now_ns) {
  const std::vector<Rank>& ranks = stuck.ranks;
  const bool world = stuck.set == kWorldSet && ranks.empty();
  const bool sound = world || (stuck.set != kWorldSet && std::ranges::is_sorted(ranks) &&
                               index_in(ranks, from) >= 0 && ranks.front() >= 0 &&
                               ranks.back() < shared_.settings.size);
  if (!sound || stuck.age_ns < 0) {
    throw Error(ErrorCode::kInternal, "a rank reported an impossible bucket");
  }
  stuck_[static_cast<size_t>(from)] = {stuck, now_ns};
  if (stuck.age_ns < patience_ns()) return;
  next_tick_ns_ = std::min(next_tick_ns_, std::max(now_ns, ticked_ns_ + kTickPauseNs));
}

std::vector<const StallMonitor::Bucket*> StallMonitor::under_way(int64_t now_ns) const {
  std::map<std::pair<SetId, bool>, const Bucket*> oldest;
  for (const Bucket& one : stuck_) {
    // Skips old reports. A rank repeats its report four times within the shorter limit (RankWatch::Patience).
    if (one.stuck.bucket == 0 || now_ns - one.said_ns >= patience_ns() / 2) continue;
    const Bucket*& first = oldest[{one.stuck.set, one.stuck.gpu}];
    if (!first || one.stuck.age_ns > first->stuck.age_ns) first = &one;
  }
  std::vector<const Bucket*> buckets;
  for (const auto& [lane, bucket] : oldest) buckets.push_back(bucket);
  return buckets;
}

// Uses the age that was reported last, because the bucket may have ended since then.
WaitingCall StallMonitor::view_of(const Bucket& bucket, int64_t now_ns, int64_t silent_ns) const {
  WaitingCall view;
  view.what = (bucket.stuck.gpu ? "GPU bucket " : "bucket ") + std::to_string(bucket.stuck.bucket) +
              " of process set " + std::to_string(bucket.stuck.set);
  view.moving = true;
  view.since_ns = now_ns - bucket.stuck.age_ns;
  std::set<Rank> stuck;
  for (Rank rank : members_of(bucket.stuck)) {
    const bool gone = is_stopped(rank) || is_silent(rank, now_ns, silent_ns);
    if (gone) stuck.insert(first_silent(rank, now_ns));
  }
  view.missing.assign(stuck.begin(), stuck.end());
  return view;
}

std::vector<WaitingCall> StallMonitor::waiting_for(int64_t age_ns, int64_t now_ns) {
  std::vector<WaitingCall> views;
  for (auto& [id, set] : shared_.sets.known()) {
    for (const Call* call : shared_.calls.waiting(*set)) {
      views.push_back(view_of(*set, *call));
    }
    if (set->joins()) views.push_back(view_of_join(*set, now_ns));
  }
  shared_.posts.for_each([&](const Posted& posted) {
    if (!posted.post.refusal) views.push_back(view_of(posted));  // nobody waits in a refused call
  });
  for (const Bucket* bucket : under_way(now_ns)) views.push_back(view_of(*bucket, now_ns));
  std::erase_if(views, [&](const WaitingCall& view) { return now_ns - view.since_ns < age_ns; });
  std::ranges::stable_sort(views, {}, &WaitingCall::since_ns);
  return views;
}

// Returns waiting calls and those that failed recently: if two block each other, the second's text names the first.
std::vector<WaitingCall> StallMonitor::all_waiting(int64_t now_ns) {
  std::erase_if(lost_, [&](const auto& lost) { return now_ns - lost.first > kAnswerNs; });
  std::vector<WaitingCall> all = waiting_for(0, now_ns);
  for (const auto& [when, view] : lost_) all.push_back(view);
  return all;
}

Failure StallMonitor::no_progress(const WaitingCall& call, const std::vector<WaitingCall>& all,
                                  int64_t now_ns) const {
  const std::string causes = all.empty() ? "" : text_from(missing_from({&call, 1}, all, now_ns));
  return {ErrorCode::kStall, "no progress: " + line_of(call, now_ns) + causes +
                                 "\n  (FARANDOLE_STALL_ABORT sets this limit)"};
}

void StallMonitor::give_up_stalled(SetState& set, int64_t now_ns) {
  std::vector<std::pair<Call*, WaitingCall>> lost;
  for (Call* call : shared_.calls.waiting(set)) {
    const bool too_old = now_ns - call->since_ns() >= shared_.settings.stall_abort_ns;
    if (too_old) lost.emplace_back(call, view_of(set, *call));
  }
  if (lost.empty()) return;
  const std::vector<WaitingCall> all = all_waiting(now_ns);
  const std::vector<WaitingCall> none;
  size_t reports = 0;
  for (auto& [call, view] : lost) {
    shared_.calls.give_up(set, *call,
                          no_progress(view, reports++ < kMaxReports ? all : none, now_ns));
    lost_.emplace_back(now_ns, std::move(view));
  }
}

// Makes an overdue join fail. give_up_stalled() has failed the set's waiting calls, because the join is no older.
void StallMonitor::give_up_join(SetState& set, int64_t now_ns) {
  if (!set.joins()) return;
  WaitingCall view = view_of_join(set, now_ns);
  if (now_ns - view.since_ns < shared_.settings.stall_abort_ns) return;
  set.join_failure = no_progress(view, all_waiting(now_ns), now_ns);
  set.join_given_up = true;
  lost_.emplace_back(now_ns, std::move(view));
}

void StallMonitor::give_up_posts(int64_t now_ns) {
  const std::vector<WaitingCall> all = all_waiting(now_ns);
  const std::vector<WaitingCall> none;
  size_t reports = 0;
  shared_.posts.fail_if([&](const Posted& posted) -> Failure {
    const bool waits = !posted.post.refusal;
    if (!waits || now_ns - posted.since_ns < shared_.settings.stall_abort_ns) return {};
    WaitingCall view = view_of(posted);
    Failure failure = no_progress(view, reports++ < kMaxReports ? all : none, now_ns);
    lost_.emplace_back(now_ns, std::move(view));
    return failure;
  });
}

// Returns the failure of a stalled bucket. It ends the job, because a bucket cannot be withdrawn. Returns kOk if no
// member is known to be stopped or silent, because the machine may just be slow.
Failure StallMonitor::standing(int64_t now_ns) const {
  const int64_t abort_ns = shared_.settings.stall_abort_ns;
  const int64_t silent_ns = std::max(kAnswerNs, std::min(kGoneNs, abort_ns / 4));
  for (const Bucket* bucket : under_way(now_ns)) {
    if (bucket->stuck.age_ns < abort_ns) continue;
    const WaitingCall view = view_of(*bucket, now_ns, silent_ns);
    if (!view.missing.empty()) return no_progress(view, {view}, now_ns);
  }
  return {};
}

void StallMonitor::ask(const std::vector<WaitingCall>& calls, int64_t now_ns) {
  std::set<Rank> asked;
  for (const WaitingCall& call : calls) asked.insert(call.missing.begin(), call.missing.end());
  // Also asks the ranks for which these ranks wait, in calls of any age, because all may wait for each other.
  const std::vector<WaitingCall> all = waiting_for(0, now_ns);
  for (size_t before = 0; before < asked.size();) {
    before = asked.size();
    for (const WaitingCall& call : all) {
      if (std::ranges::any_of(call.here, [&](Rank rank) { return asked.contains(rank); }))
        asked.insert(call.missing.begin(), call.missing.end());
    }
  }
  for (const Bucket* bucket : under_way(now_ns)) {
    const std::vector<Rank> members = members_of(bucket->stuck);
    asked.insert(members.begin(), members.end());
  }
  for (const Rank rank : std::vector<Rank>(asked.begin(), asked.end())) {
    for (Rank leader = above(rank); leader != 0; leader = above(leader)) asked.insert(leader);
  }
  for (Rank rank : asked) {
    RankState& state = ranks_[static_cast<size_t>(rank)];
    if (!state.owes_answer()) state.asked_ns = now_ns;
  }
  question_ns_ = now_ns;
  question_open_ = true;
  next_question_ns_ =
      now_ns + (shared_.settings.stall_warn_ns > 0 ? shared_.settings.stall_warn_ns : kAnswerNs);
  if (!asked.empty()) shared_.outbox.write(CollectStacks{{asked.begin(), asked.end()}});
}

void StallMonitor::answered(Rank from, const StackReport& stack_report, int64_t now_ns) {
  RankState& state = ranks_[static_cast<size_t>(from)];
  if (state.asked_ns < 0) return;
  state.answered_ns = now_ns;
  state.answer = stack_report;
  if (const int64_t ago = stack_report.direct_ago_ns; ago >= 0) {
    // This time is not later than the rank's last call, because the rank was asked before it computed `ago`.
    state.heard_ns = std::max(state.heard_ns, state.asked_ns - ago);
    active_ns_ = std::max(active_ns_, state.heard_ns);
  }
  if (question_open_ && all_answered()) conclude(now_ns);
}

std::vector<BlockedRank> StallMonitor::blocked_for_good(const std::vector<WaitingCall>& all) const {
  std::map<Rank, const WaitingCall*> waits;
  for (Rank rank = 0; rank < shared_.settings.size; ++rank) {
    const RankState& state = state_of(rank);
    const bool blocked = state.answered_ns >= question_ns_ && state.answered_ns > state.heard_ns &&
                         state.answer.blocked;
    if (!blocked) continue;
    const auto call = std::ranges::find_if(all, [&](const WaitingCall& one) {
      return !one.moving && same(one.key, state.answer.call) && has(one.here, rank);
    });
    if (call != all.end()) waits[rank] = &*call;
  }
  // Drops ranks that wait for no other blocked rank: they may continue, and so may the ranks that wait for them.
  while (std::erase_if(waits, [&](const auto& one) { return !waits_among(*one.second, waits); }) >
         0) {
  }
  std::vector<BlockedRank> blocked;
  for (const auto& [rank, call] : waits)
    blocked.push_back({rank, call, state_of(rank).answer.text});
  return blocked;
}

// Makes the deadlocked calls fail on every rank that has submitted them.
void StallMonitor::end_disagreement(std::span<const WaitingCall> calls,
                                    const std::string& diagnosis, int64_t now_ns) {
  std::string text = "no progress: " + diagnosis;
  for (const CallGroup& group : grouped(calls)) text += "\n  " + line_of(group, now_ns);
  text += "\n  (these ranks wait for each other and can't go on; rank 0 has printed their stacks)";
  const Failure failure{ErrorCode::kStall, text};
  const auto concerned = [&](const CallKey& key) {
    return std::ranges::any_of(calls, [&](const WaitingCall& call) { return same(call.key, key); });
  };
  for (auto& [id, set] : shared_.sets) {
    if (is_pair(id)) continue;
    for (Call* call : shared_.calls.waiting(*set)) {
      if (concerned(call->key())) shared_.calls.give_up(*set, *call, failure);
    }
  }
  shared_.posts.fail_if(
      [&](const Posted& posted) { return concerned(posted.key()) ? failure : Failure{}; });
}

// Warns users. Omits the parts that have not changed since the last warning.
void StallMonitor::warn(std::span<const WaitingCall> calls, const std::vector<WaitingCall>& all,
                        const std::string& diagnosis, int64_t now_ns) {
  std::vector<WarningPart> parts;
  const std::vector<CallGroup> groups = grouped(calls);
  for (const CallGroup& group : groups) {
    if (parts.size() == kMaxCalls) {
      parts.push_back({"\n  and " + std::to_string(groups.size() - kMaxCalls) + " more", ""});
      break;
    }
    parts.push_back({"\n  " + line_of(group, now_ns), line_of(group, -1)});
  }
  for (WarningPart& part : missing_from(calls, all, now_ns)) parts.push_back(std::move(part));
  const std::set<std::string> before = std::exchange(warned_, {});
  std::string text;
  for (const WarningPart& part : parts) {
    if (!before.contains(part.kept)) text += part.text;
    warned_.insert(part.kept);
  }
  const std::string header = diagnosis.empty() ? "some ranks wait for others:" : diagnosis;
  if (before.empty()) return shared_.outbox.notice(header + text);
  const std::string age = std::to_string((now_ns - calls[0].since_ns) / 1'000'000'000) + " s";
  shared_.outbox.notice(
      "some ranks still wait for others, for up to " + age +
      (text.empty() ? "; nothing else has changed" : "; this has changed:" + text));
}

// Call this when all ranks have answered, or after kAnswerNs. Warns if calls are still waiting.
void StallMonitor::conclude(int64_t now_ns) {
  question_open_ = false;
  const int64_t patience = shared_.settings.stall_warn_ns;
  if (patience <= 0) return;
  const std::vector<WaitingCall> all = all_waiting(now_ns);
  const std::vector<BlockedRank> blocked = blocked_for_good(all);
  std::map<Rank, const WaitingCall*> waits;
  for (const BlockedRank& one : blocked) waits[one.rank] = one.call;
  std::vector<WaitingCall> calls = waiting_for(0, now_ns);
  std::erase_if(calls, [&](const WaitingCall& call) {
    return now_ns - call.since_ns < patience && !waits_among(call, waits);
  });
  if (calls.empty() || now_ns - calls[0].since_ns < patience) return;
  const std::string diagnosis = diagnosis_of(blocked);
  warn(calls, all, diagnosis, now_ns);
  if (blocked.empty() || shared_.settings.stall_abort_ns <= 0) return;
  std::erase_if(calls, [&](const WaitingCall& call) { return !waits_among(call, waits); });
  end_disagreement(calls, diagnosis, now_ns);
}

Failure StallMonitor::tick(int64_t now_ns) {
  next_tick_ns_ = kNever;
  ticked_ns_ = now_ns;
  if (shared_.settings.stall_abort_ns > 0) {
    give_up_posts(now_ns);
    for (auto& [id, set] : shared_.sets.known()) {
      give_up_stalled(*set, now_ns);
      give_up_join(*set, now_ns);
    }
    if (Failure failure = standing(now_ns)) return failure;
  }
  std::vector<WaitingCall> overdue = waiting_for(patience_ns(), now_ns);
  if (overdue.empty()) warned_.clear();
  if (!overdue.empty() && now_ns >= next_question_ns_) ask(overdue, now_ns);
  const int64_t answer_by = question_ns_ + kAnswerNs;
  if (question_open_ && (all_answered() || now_ns >= answer_by)) conclude(now_ns);

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
  std::optional<WaitingCall> view;
  const bool of_calls = set && !inquire.join && !inquire.key.posted();
  for (Call* call : of_calls ? shared_.calls.waiting(*set) : std::vector<Call*>{}) {
    const CallKey& key = call->key();
    if (key.name == inquire.key.name && key.sequence == inquire.key.sequence) {
      view = view_of(*set, *call);
    }
  }
  shared_.posts.for_each([&](const Posted& posted) {
    if (same(posted.key(), inquire.key)) view = view_of(posted);
  });
  if (view) {
    const std::vector<WaitingCall> all = all_waiting(now_ns);
    text = line_of(*view, now_ns) + text_from(missing_from({&*view, 1}, all, now_ns));
  }
  if (text.empty()) text = "all ranks have submitted it, and its bytes are under way";
  return text;
}

}  // namespace farandole
