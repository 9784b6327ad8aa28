// SPDX-License-Identifier: Apache-2.0
// Watches calls that wait for a rank: asks that rank for its stack, warns people, finally fails the call.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/collective.h"
#include "base/types.h"
#include "control/coordinator/open_calls.h"
#include "control/coordinator/set_table.h"

namespace farandole {

// The text of stall warnings: who waits for whom since when, the missing ranks' stacks, and the most likely
// cause. Text only; StallMonitor decides when.
struct WaitingCall {
  std::string what;  // "'grad.w' (allreduce)"
  std::string name;
  std::string group;          // if no rank is missing: calls of this group are
  std::vector<Rank> here;     // have submitted it; joined ranks excluded
  std::vector<Rank> missing;  // have not
  Rank first = -1;            // rank that submitted it first
  Rank last = -1;
  int64_t since_ns = 0;
  int64_t last_ns = 0;
  bool made_before = false;  // a call of this name has been complete once
  bool moving = false;       // all have submitted it; its bytes don't move, `missing` don't answer
  // ---- of a message's end that waits for the other one
  End end = End::kNone;
  int64_t tag = 0;
};

// What is known of one rank.
struct RankState {
  int64_t heard_ns = -1;  // its last call; -1: none yet
  bool silent = false;    // asked for its stack, it has not answered
  bool stopped = false;   // by a signal or a debugger
  SetId joined = -1;      // the set in whose join() it waits
  std::string where;      // its answer; empty: none
};
using StateOf = std::function<RankState(Rank)>;

// One line, such as "'x' (allreduce): ranks 0, 2 waiting for 10 s, rank 1 missing".
std::string line_of(const WaitingCall& call, int64_t now_ns);

// Why `rank` does not take part in `call`, judged by `all` waiting calls.
std::string cause_of(const WaitingCall& call, Rank rank, const RankState& state,
                     const std::vector<WaitingCall>& all, int64_t now_ns);

// Cause and stack of each missing rank of `calls`: indented lines, each after a newline.
std::string causes_of(const std::vector<WaitingCall>& calls, const std::vector<WaitingCall>& all,
                      const StateOf& state_of, int64_t now_ns);

// The whole warning about `calls`, which have waited too long.
std::string stall_report(const std::vector<WaitingCall>& calls, const std::vector<WaitingCall>& all,
                         const StateOf& state_of, int64_t now_ns);

// Whether two names are probably meant to be the same: they differ in few letters.
bool near_names(const std::string& a, const std::string& b);

class StallMonitor {
 public:
  explicit StallMonitor(Shared& shared)
      : shared_(shared), heard_ns_(static_cast<size_t>(shared.settings.size), -1) {}

  // Called when a rank makes a call.
  void heard(Rank rank, int64_t now_ns) { heard_ns_[static_cast<size_t>(rank)] = now_ns; }
  // Something began at `since_ns`: schedules ticks for its limits that lie ahead.
  void expect_progress(int64_t since_ns, int64_t now_ns);
  void answered(Rank from, const StackReport& stack_report, int64_t now_ns);
  // A rank's own limit (timeout=) has passed: tells whom its call waits for. `set`: null if it was removed.
  std::string explain(SetState* set, const Inquire& inquire, int64_t now_ns);
  // Fails overdue calls, asks ranks, warns. A returned failure is the job's: a bucket can't be withdrawn.
  Failure tick(int64_t now_ns);
  int64_t next_tick() const { return next_tick_ns_; }  // INT64_MAX: nothing waits

 private:
  int64_t patience_ns() const;
  WaitingCall view_of(const SetState& set, const Call& call) const;
  WaitingCall view_of(const Posted& posted) const;
  WaitingCall view_of_bucket(const SetState& set) const;
  const StackReport* answer_of(Rank rank) const;  // null: it has not answered
  RankState state_of(Rank rank) const;
  StateOf states() const;
  std::vector<WaitingCall> waiting_for(int64_t age_ns, int64_t now_ns);  // oldest first
  std::vector<WaitingCall> all_waiting(int64_t now_ns);
  // `all`: empty: without causes and stacks.
  Failure no_progress(const WaitingCall& call, const std::vector<WaitingCall>& all,
                      int64_t now_ns) const;
  void give_up_stalled(SetState& set, int64_t now_ns);
  void give_up_posts(int64_t now_ns);
  Failure standing(const SetState& set, int64_t now_ns) const;
  void ask(const std::vector<WaitingCall>& calls, int64_t now_ns);
  void conclude(int64_t now_ns);

  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  Shared& shared_;
  int64_t next_tick_ns_ = kNever;
  std::vector<int64_t> heard_ns_;  // by rank: time of its last call; -1: none
  // The last CollectStacks: the ranks asked, and their answers.
  std::set<Rank> questioned_;
  std::map<Rank, StackReport> answers_;
  int64_t question_ns_ = -1;
  std::map<Rank, StackReport> earlier_answers_;  // to the previous question
  int64_t earlier_ns_ = -1;                      // time of the previous question
  int64_t next_question_ns_ = 0;
  bool question_open_ = false;
  std::vector<std::pair<int64_t, WaitingCall>> lost_;  // calls given up recently, with the time
};

}  // namespace farandole
