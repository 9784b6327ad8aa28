// SPDX-License-Identifier: Apache-2.0
// Watches everything that waits for a rank (calls, sends and receives, joins, buckets): asks the rank for its stack,
// warns users, and finally fails the waiting calls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"
#include "control/coordinator/diagnosis.h"
#include "control/coordinator/open_calls.h"
#include "control/coordinator/set_table.h"

namespace farandole {

class StallMonitor {
 public:
  explicit StallMonitor(Shared& shared)
      : shared_(shared), ranks_(static_cast<size_t>(shared.settings.size)), stuck_(ranks_.size()) {}

  // Call when a rank makes a call.
  void heard(Rank rank, int64_t now_ns) {
    active_ns_ = now_ns;
    ranks_[static_cast<size_t>(rank)].heard_ns = now_ns;
  }
  void bucket_ended(int64_t now_ns) { active_ns_ = now_ns; }
  // Call when a call or bucket has started at `since_ns`. Schedules ticks at its next limits.
  void expect_progress(int64_t since_ns, int64_t now_ns);
  void answered(Rank from, const StackReport& stack_report, int64_t now_ns);
  // Throws Error(kInternal) on a report that a correct rank would not send.
  void stands_still(Rank from, const Stuck& stuck, int64_t now_ns);
  // Call when a rank's own limit (timeout=) has passed. Says for which ranks the call waits. `set`: null if removed.
  std::string explain(SetState* set, const Inquire& inquire, int64_t now_ns);
  // Fails overdue calls, asks ranks for stacks, warns users. A returned failure ends the job.
  Failure tick(int64_t now_ns);
  int64_t next_tick() const { return next_tick_ns_; }  // INT64_MAX: nothing waits

 private:
  struct Bucket {
    Stuck stuck = {};  // bucket 0: none
    int64_t said_ns = 0;
  };
  struct RankState {
    int64_t heard_ns = -1;     // time of its last call; -1: none yet
    int64_t asked_ns = -1;     // time of the first unanswered question for its stack
    int64_t answered_ns = -1;  // time of its last answer
    StackReport answer = {};

    bool owes_answer() const { return asked_ns > std::max(heard_ns, answered_ns); }
  };
  const RankState& state_of(Rank rank) const { return ranks_[static_cast<size_t>(rank)]; }
  // True if the rank has owed an answer for `for_ns`.
  bool is_silent(Rank rank, int64_t now_ns, int64_t for_ns = kAnswerNs) const;
  bool is_stopped(Rank rank) const;  // by a signal or a debugger
  Rank above(Rank rank) const;       // the rank that forwards its reports; 0: rank 0, or none
  // For a rank that does not answer: the silent rank on its path to rank 0 that is nearest to rank 0.
  Rank first_silent(Rank rank, int64_t now_ns) const;
  bool all_answered() const;
  SetId joined_by(Rank rank) const;  // the set in whose join() the rank waits; -1: none

  int64_t patience_ns() const;
  WaitingCall view_of(const SetState& set, const Call& call) const;
  WaitingCall view_of(const Posted& posted) const;
  WaitingCall view_of_join(const SetState& set, int64_t now_ns) const;
  std::vector<Rank> members_of(const Stuck& stuck) const;
  // Only members that are stopped, or have been silent for `silent_ns`, count as missing.
  WaitingCall view_of(const Bucket& bucket, int64_t now_ns, int64_t silent_ns = kAnswerNs) const;
  // Returns each lane's oldest bucket that is unfinished on a rank whose user waits.
  std::vector<const Bucket*> under_way(int64_t now_ns) const;
  std::vector<WaitingCall> waiting_for(int64_t age_ns, int64_t now_ns);  // oldest first
  std::vector<WaitingCall> all_waiting(int64_t now_ns);
  // Facts about one rank that is missing in `call`.
  std::string standing_of(Rank rank, const WaitingCall& call, const std::vector<WaitingCall>& all,
                          int64_t now_ns) const;
  // Facts and stack of a rank that is missing in calls: indented lines, each after a newline.
  struct WarningPart {
    std::string text;
    std::string kept;  // see kept_of()
  };
  static std::string text_from(const std::vector<WarningPart>& parts);
  std::vector<WarningPart> missing_from(std::span<const WaitingCall> calls,
                                        const std::vector<WaitingCall>& all, int64_t now_ns) const;
  // If `all` is empty, the failure's text has neither facts nor stacks.
  Failure no_progress(const WaitingCall& call, const std::vector<WaitingCall>& all,
                      int64_t now_ns) const;
  void give_up_stalled(SetState& set, int64_t now_ns);
  void give_up_join(SetState& set, int64_t now_ns);
  void give_up_posts(int64_t now_ns);
  Failure standing(int64_t now_ns) const;
  void ask(const std::vector<WaitingCall>& calls, int64_t now_ns);
  void conclude(int64_t now_ns);
  void warn(std::span<const WaitingCall> calls, const std::vector<WaitingCall>& all,
            const std::string& diagnosis, int64_t now_ns);
  // Ranks in a deadlock: each is blocked in a call that another of them has not made.
  std::vector<BlockedRank> blocked_for_good(const std::vector<WaitingCall>& all) const;
  void end_disagreement(std::span<const WaitingCall> calls, const std::string& diagnosis,
                        int64_t now_ns);

  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  static constexpr int64_t kAnswerNs = 1'500'000'000;  // time for a rank's answer

  Shared& shared_;
  int64_t next_tick_ns_ = kNever;
  int64_t ticked_ns_ = 0;
  int64_t active_ns_ = 0;  // when a rank last made a call, or a bucket ended
  std::vector<RankState> ranks_;
  std::vector<Bucket> stuck_;  // each rank's last Stuck
  int64_t question_ns_ = -1;   // time of the last CollectStacks
  int64_t next_question_ns_ = 0;
  bool question_open_ = false;
  std::set<std::string> warned_;                       // WarningPart::kept of the last warning
  std::vector<std::pair<int64_t, WaitingCall>> lost_;  // calls given up recently, with the time
};

}  // namespace farandole
