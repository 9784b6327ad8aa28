// SPDX-License-Identifier: Apache-2.0
// Calls that wait for a rank: it is asked where it is, people are told, and the call is given up in the end.
#pragma once

#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "control/coordinator/open_calls.h"
#include "control/coordinator/settings.h"
#include "control/coordinator/stall_report.h"

namespace farandole {

class StallMonitor {
 public:
  StallMonitor(const CoordinatorSettings& settings, SetTable& sets, OpenCalls& calls,
               Outbox& outbox);

  // A rank has made a call.
  void heard(Rank rank, int64_t now_ns) { heard_ns_[static_cast<size_t>(rank)] = now_ns; }
  // Something began at `since_ns`: the times at which it will have taken too long, as far as they lie ahead.
  void expect_progress(int64_t since_ns, int64_t now_ns);
  void answered(Rank from, const Whereabouts& whereabouts, int64_t now_ns);
  // One rank's own limit has passed (timeout=): whom that call waits for. `set`: nullptr: it was removed.
  std::string explain(SetState* set, const Inquire& inquire, int64_t now_ns);
  // Gives up calls, asks and tells. A failure is the job's: a bucket stands still, and can't be taken back.
  Failure tick(int64_t now_ns);
  int64_t next_tick() const { return next_tick_ns_; }  // INT64_MAX: nothing waits

 private:
  int64_t patience_ns() const;
  WaitingCall view_of(const SetState& set, const Call& call) const;
  WaitingCall view_of_bucket(const SetState& set) const;
  const Whereabouts* answer_of(Rank rank) const;  // null: it is silent
  RankState state_of(Rank rank) const;
  StateOf states() const;
  std::vector<WaitingCall> waiting_for(int64_t age_ns, int64_t now_ns);  // oldest first
  std::vector<WaitingCall> all_waiting(int64_t now_ns);
  void give_up_stalled(SetState& set, int64_t now_ns);
  Failure standing(const SetState& set, int64_t now_ns) const;
  void ask(const std::vector<WaitingCall>& calls, int64_t now_ns);
  void conclude(int64_t now_ns);

  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  const CoordinatorSettings& settings_;
  SetTable& sets_;
  OpenCalls& calls_;
  Outbox& outbox_;
  int64_t next_tick_ns_ = kNever;
  std::vector<int64_t> heard_ns_;  // by rank: its last call; -1: none yet
  // The last question where ranks are that others wait for, and its answers.
  std::set<Rank> asked_;
  std::map<Rank, Whereabouts> answers_;
  int64_t asked_ns_ = -1;
  std::map<Rank, Whereabouts> earlier_answers_;  // to the question before
  int64_t earlier_ns_ = -1;                      // when that was asked
  int64_t next_question_ns_ = 0;
  bool question_open_ = false;
  std::vector<std::pair<int64_t, WaitingCall>> lost_;  // given up of late, and when
};

}  // namespace farandole
