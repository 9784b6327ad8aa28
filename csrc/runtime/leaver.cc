// SPDX-License-Identifier: Apache-2.0
#include "runtime/leaver.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace farandole {

// Reports the leave; returns until when this rank waits for the others.
Deadline Leaver::say(bool failed, const std::string& why) {
  std::lock_guard lock(mutex_);
  calls_.close();
  const bool again = std::exchange(said_, true);
  if (again && (said_failed_ || !failed)) return limit_;
  // Leaving a broken job is not a normal leave.
  const bool broken = calls_.job.broken();
  said_failed_ = failed || broken;
  const double patience = said_failed_ ? config_.leave_timeout : config_.shutdown_timeout;
  const bool for_ever = !said_failed_ && patience == 0;
  limit_ = for_ever ? Deadline::never() : Deadline::in(nanoseconds(patience));
  calls_.report(Leave{said_failed_, broken ? calls_.job.failure().text : why});
  driver_.after_submit();
  return limit_;
}

// The coordinator's failure names the ranks that stay; without it, rank 0 does not answer.
Failure Leaver::why_alone() const {
  if (calls_.job.broken()) return calls_.job.failure();
  return {ErrorCode::kStall, watch_.leader_process().stands()
                                 ? watch_.leader_process().text()
                                 : "shutdown(): rank 0, which leads the job, no longer answers"};
}

Failure Leaver::gave_up() const {
  std::lock_guard lock(mutex_);
  return gave_up_;
}

bool Leaver::leave(bool failed, const std::string& why, Deadline deadline) {
  const JobState& job = calls_.job;
  const Deadline limit = say(failed, why);
  auto over = [&] { return job.stopped() || job.broken() || limit.expired(); };
  if (!failed) watch_.recorder().left();
  if (!driver_.await(over, std::min(deadline, limit)) && !over()) return false;
  if (!failed && !job.stopped() && !job.broken()) {
    std::ostringstream after;
    after << "FARANDOLE_SHUTDOWN_TIMEOUT is " << config_.shutdown_timeout << " s";
    const Deadline last = say(true, after.str());
    while (!driver_.await([&] { return job.broken(); }, last) && !last.expired()) {
    }
    std::lock_guard lock(mutex_);
    gave_up_ = why_alone();
  }
  calls_.job.fail({ErrorCode::kShutdown, "shutdown() was called while this call was under way"});
  driver_.ring();
  // The driver fails everything that still waits; signals don't interrupt this wait.
  while (!driver_.await([&] { return job.broken(); }, Deadline::never())) {
  }
  return true;
}

}  // namespace farandole
