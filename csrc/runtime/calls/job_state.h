// SPDX-License-Identifier: Apache-2.0
// How far the job is on this rank: under way, broken or stopped. Broken and stopped are for good.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace farandole {

class JobState {
 public:
  // ---- any thread
  bool broken() const { return broken_; }
  bool stopped() const { return stopped_; }            // all ranks have left
  const Failure& failure() const { return failure_; }  // once broken
  // The driver gives up with this, unless the log tells a better reason first. Then ring the own bell.
  void fail(Failure failure) {
    std::lock_guard lock(mutex_);
    if (!found_) found_ = std::move(failure);
    failing_ = true;
  }
  bool failing() const { return failing_; }

  // ---- the driver
  // True: somebody called fail(), and nobody has acted on it.
  bool take_found(Failure& failure) {
    if (!failing_.exchange(false)) return false;
    std::lock_guard lock(mutex_);
    failure = found_;
    return true;
  }
  void stop() { stopped_ = true; }
  void break_down(const Failure& failure) {
    failure_ = failure;
    broken_ = true;
  }

 private:
  std::mutex mutex_;
  Failure found_;
  Failure failure_;
  std::atomic<bool> failing_{false};
  std::atomic<bool> broken_{false};
  std::atomic<bool> stopped_{false};
};

}  // namespace farandole
