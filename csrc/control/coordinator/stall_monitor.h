// SPDX-License-Identifier: Apache-2.0
// Watches everything that waits for a rank: calls, sends and receives, joins, and buckets. Asks the rank for its stack,
// warns users, and finally makes the waiting calls fail.
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

  // Call this when a rank makes a call.
  void heard(Rank rank, int64_t now_ns) {
    active_ns_ = now_ns;
    ranks_[static_cast<size_t>(rank)].heard_ns = now_ns;
  }
  void bucket_ended(int64_t now_ns) { active_ns_ = now_ns; }
  // Call this when a call or bucket has started at `since_ns`. Schedules ticks at the limits that it will reach next.
  void expect_progress(int64_t since_ns, int64_t now_ns);
  void answered(Rank from, const StackReport& stack_report, int64_t now_ns);
  // Throws Error(kInternal) on a report that a correct rank would not send.
  void stands_still(Rank from, const Stuck& stuck, int64_t now_ns);
  // Call this when a limit that the rank has set itself (timeout=) has passed. Returns a text that names the ranks for
  // which the call waits. `set` is null if the set was removed.
  std::string explain(SetState* set, const Inquire& inquire, int64_t now_ns);
  // Makes overdue calls fail, asks ranks for stacks, and warns users. A failure that it returns ends the job.
  Failure tick(int64_t now_ns);
  int64_t next_tick() const { return next_tick_ns_; }  // INT64_MAX if nothing waits

 private:
  struct Bucket {
    Stuck stuck = {};  // bucket number 0 means that there is none
    int64_t said_ns = 0;
  };
  struct RankState {
    int64_t heard_ns = -1;     // time of the rank's last call; -1 if there is none yet
    int64_t asked_ns = -1;     // time of the first unanswered question for the rank's stack
    int64_t answered_ns = -1;  // time of the rank's last answer
    StackReport answer = {};

    bool owes_answer() const { return asked_ns > std::max(heard_ns, answered_ns); }
  };
  const RankState& state_of(Rank rank) const { return ranks_[static_cast<size_t>(rank)]; }
  // True if the rank has owed an answer for the time `for_ns`.
  bool is_silent(Rank rank, int64_t now_ns, int64_t for_ns = kAnswerNs) const;
  bool is_stopped(Rank rank) const;  // true if a signal or a debugger has stopped the rank
  // Returns the rank that forwards this rank's reports, or 0 if rank 0 takes them directly.
  Rank above(Rank rank) const;
  // For a rank that does not answer. Returns the silent rank nearest to rank 0 on the path between the two.
  Rank first_silent(Rank rank, int64_t now_ns) const;
  bool all_answered() const;
  SetId joined_by(Rank rank) const;  // the set in whose join() the rank waits; -1 if there is none

  int64_t patience_ns() const;
  WaitingCall view_of(const SetState& set, const Call& call) const;
  WaitingCall view_of(const Posted& posted) const;
  WaitingCall view_of_join(const SetState& set, int64_t now_ns) const;
  std::vector<Rank> members_of(const Stuck& stuck) const;
  // Only members that are stopped or have been silent for the time `silent_ns` count as missing.
  WaitingCall view_of(const Bucket& bucket, int64_t now_ns, int64_t silent_ns = kAnswerNs) const;
  // Returns the oldest bucket of each lane, among the buckets that are unfinished on a rank whose user waits.
  std::vector<const Bucket*> under_way(int64_t now_ns) const;
  std::vector<WaitingCall> waiting_for(int64_t age_ns, int64_t now_ns);  // oldest call first
  std::vector<WaitingCall> all_waiting(int64_t now_ns);
  // Returns facts about one rank that is missing in `call`.
  std::string standing_of(Rank rank, const WaitingCall& call, const std::vector<WaitingCall>& all,
                          int64_t now_ns) const;
  // Facts about a rank that other ranks wait for, and its stack. The text consists of indented lines, each after a
  // newline.
  struct WarningPart {
    std::string text;
    std::string kept;  // see kept_of()
  };
  static std::string text_from(const std::vector<WarningPart>& parts);
  std::vector<WarningPart> missing_from(std::span<const WaitingCall> calls,
                                        const std::vector<WaitingCall>& all, int64_t now_ns) const;
  // If `all` is empty, the text of the failure has neither facts nor stacks.
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
  // Returns the ranks of a deadlock. Each is blocked in a call that another of these ranks has not made.
  std::vector<BlockedRank> blocked_for_good(const std::vector<WaitingCall>& all) const;
  void end_disagreement(std::span<const WaitingCall> calls, const std::string& diagnosis,
                        int64_t now_ns);

  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  static constexpr int64_t kAnswerNs = 1'500'000'000;  // time that a rank has to answer

  Shared& shared_;
  int64_t next_tick_ns_ = kNever;
  int64_t ticked_ns_ = 0;
  int64_t active_ns_ = 0;  // when a rank last made a call or a bucket last ended
  std::vector<RankState> ranks_;
  std::vector<Bucket> stuck_;  // the last Stuck of each rank
  int64_t question_ns_ = -1;   // time of the last CollectStacks
  int64_t next_question_ns_ = 0;
  bool question_open_ = false;
  std::set<std::string> warned_;  // WarningPart::kept of each part of the last warning
  std::vector<std::pair<int64_t, WaitingCall>> lost_;  // calls given up recently, with the time
};

}  // namespace farandole
