// SPDX-License-Identifier: Apache-2.0
// The calls of one rank: the state that submitting threads and the driver share.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "runtime/calls/handles.h"
#include "runtime/calls/job_state.h"
#include "runtime/calls/pending.h"
#include "runtime/calls/posted_calls.h"
#include "runtime/calls/process_sets.h"
#include "runtime/calls/reporter.h"

namespace farandole {

// This rank's questions to the coordinator (Inquire) and the answers.
class Questions {
 public:
  uint64_t ask() { return ++last_; }
  void answer(uint64_t number, std::string text) {
    answers_[number] = std::move(text);
    // The asking thread may have given up, so old answers are dropped.
    if (answers_.size() > kMaxAnswers) answers_.erase(answers_.begin());
  }
  // nullopt: no answer yet.
  std::optional<std::string> take(uint64_t number) {
    auto answer = answers_.extract(number);
    return answer ? std::optional(std::move(answer.mapped())) : std::nullopt;
  }

 private:
  static constexpr size_t kMaxAnswers = 64;
  uint64_t last_ = 0;
  std::map<uint64_t, std::string> answers_;
};

struct RankCalls {
  RankCalls(Rank own, MemberChannel& channel, bool gathered)
      : posted(own), sets(own), reporter(channel, gathered) {}

  std::mutex mutex;  // guards the next five
  PendingTable pending;
  PostedCalls posted;
  ProcessSets sets;
  Reporter reporter;
  Questions questions;

  // These have locks of their own.
  Handles handles;
  JobState job;

  // Sends one report to the coordinator at once.
  void report(const Report& report) {
    std::lock_guard lock(mutex);
    reporter.send(report);
  }
  // Reports this rank's join() once no report before it waits, because a rank that has joined reports nothing.
  // Under `mutex`.
  void tell_join(SetId id) {
    ProcessSet* set = sets.find(id);
    if (!set || !set->joined() || set->join_told || pending.owes_reports(id)) return;
    set->join_told = true;
    reporter.send(Join{id, std::exchange(set->join_failure, {})});
  }
  // See Reporter. Skips the mutex when there is nothing to do.
  void expedite() {
    if (!reporter.may_expedite()) return;
    std::lock_guard lock(mutex);
    reporter.expedite();
  }
};

}  // namespace farandole
