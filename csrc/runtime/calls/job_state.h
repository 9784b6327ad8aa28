// SPDX-License-Identifier: Apache-2.0
// The one owner of the job's end on this rank: all that depends on it asks here.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "lib/ipc/event_count.h"

namespace farandole {

// Running, leaving, broken or stopped. It only goes on in this order, and from stopped to broken when this rank ends.
class JobState {
 public:
  explicit JobState(EventCount& driver) : driver_(driver) {}

  // ---- Any thread
  bool left() const { return left_; }                         // by leave(), whatever came since
  bool leaving() const { return phase_ != Phase::kRunning; }  // no more calls
  bool stopped() const { return phase_ >= Phase::kStopped; }  // all ranks have left
  bool broken() const { return phase_ == Phase::kBroken || phase_ == Phase::kEnded; }
  bool over() const { return phase_ >= Phase::kBroken; }
  const Failure& failure() const { return failure_; }  // valid once broken
  // True: this is news, so the coordinator has to hear of it. A normal leave may be followed by a failed one.
  bool leave(bool failed, Deadline limit) {
    std::lock_guard lock(mutex_);
    left_ = true;
    const Phase next = failed ? Phase::kFailing : Phase::kLeaving;
    if (phase_ >= next) return false;
    phase_ = next;
    limit_ = limit;
    return true;
  }
  // Until when this rank waits for the others, once it leaves.
  Deadline limit() const {
    std::lock_guard lock(mutex_);
    return limit_;
  }
  // Makes the driver end the job with this, unless the log brings an earlier reason.
  void fail(Failure failure) {
    {
      std::lock_guard lock(mutex_);
      if (!found_) found_ = std::move(failure);
      failing_ = true;
    }
    driver_.notify();
  }
  bool failing() const { return failing_; }

  // ---- The driver
  // True: fail() was called and has not been acted upon.
  bool take_found(Failure& failure) {
    if (!failing_.exchange(false)) return false;
    std::lock_guard lock(mutex_);
    failure = found_;
    return true;
  }
  // The job's end after this was found: once all have left, the death of a peer means only that it ended first.
  Failure verdict(Failure found) const {
    if (!stopped() || found.code != ErrorCode::kPeer) return found;
    return {ErrorCode::kShutdown, "farandole has been shut down"};
  }
  void stop() {
    std::lock_guard lock(mutex_);
    phase_ = Phase::kStopped;
  }
  void break_down(const Failure& failure) {
    std::lock_guard lock(mutex_);
    failure_ = failure;
    phase_ = stopped() ? Phase::kEnded : Phase::kBroken;
  }

 private:
  enum class Phase { kRunning, kLeaving, kFailing, kBroken, kStopped, kEnded };
  EventCount& driver_;
  mutable std::mutex mutex_;
  Failure found_;
  Failure failure_;
  Deadline limit_ = Deadline::never();
  std::atomic<bool> left_{false};
  std::atomic<bool> failing_{false};
  std::atomic<Phase> phase_{Phase::kRunning};
};

}  // namespace farandole
