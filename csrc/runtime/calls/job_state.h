// SPDX-License-Identifier: Apache-2.0
// The job's state on this rank. No other object decides how the job ends.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "lib/ipc/event_count.h"

namespace farandole {

// The phases are running -> leaving or failing (this rank leaves, normally or not) -> stopped (all ranks have left) ->
// ended. From running, leaving or failing, the phase may instead become broken, which means that the job has failed.
class JobState {
 public:
  explicit JobState(Wakeup driver) : driver_(driver) {}

  // ---- Any thread
  bool left() const { return left_; }                       // true from the first leave() on
  bool leaving() const { return life_ != Life::kRunning; }  // this rank makes no more calls
  bool stopped() const { return life_ >= Life::kStopped; }  // all ranks have left
  bool broken() const { return life_ == Life::kBroken || life_ == Life::kEnded; }
  bool over() const { return life_ >= Life::kBroken; }
  const Failure& failure() const { return failure_; }  // valid once broken() is true
  // Returns true if the caller must report the leave to the coordinator. A failed leave may follow a normal one.
  bool leave(bool failed, Deadline limit) {
    std::lock_guard lock(mutex_);
    left_ = true;
    const Life next = failed ? Life::kFailing : Life::kLeaving;
    if (life_ >= next) return false;
    life_ = next;
    limit_ = limit;
    return true;
  }
  // Returns the deadline until which this rank waits for the others after leave().
  Deadline limit() const {
    std::lock_guard lock(mutex_);
    return limit_;
  }
  // Makes the driver end the job with this failure, unless the log brings another failure first.
  void fail(Failure failure) {
    {
      std::lock_guard lock(mutex_);
      if (!found_) found_ = std::move(failure);
      failing_ = true;
    }
    driver_.notify();
  }
  bool failing() const { return failing_; }

  // ---- Driver only
  // Returns true if fail() was called since the last take_found().
  bool take_found(Failure& failure) {
    if (!failing_.exchange(false)) return false;
    std::lock_guard lock(mutex_);
    failure = found_;
    return true;
  }
  // Returns the failure with which the job ends. Once all ranks have left, a peer's death is not a failure: that peer
  // has merely exited before this rank.
  Failure verdict(Failure found) const {
    if (!stopped() || found.code != ErrorCode::kPeer) return found;
    return {ErrorCode::kShutdown, "farandole has been shut down"};
  }
  void stop() {
    std::lock_guard lock(mutex_);
    life_ = Life::kStopped;
  }
  void break_down(const Failure& failure) {
    std::lock_guard lock(mutex_);
    failure_ = failure;
    life_ = stopped() ? Life::kEnded : Life::kBroken;
  }

 private:
  enum class Life { kRunning, kLeaving, kFailing, kBroken, kStopped, kEnded };
  Wakeup driver_;
  mutable std::mutex mutex_;
  Failure found_;
  Failure failure_;
  Deadline limit_ = Deadline::never();
  std::atomic<bool> left_{false};
  std::atomic<bool> failing_{false};
  std::atomic<Life> life_{Life::kRunning};
};

}  // namespace farandole
