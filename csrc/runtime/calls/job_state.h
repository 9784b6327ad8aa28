// SPDX-License-Identifier: Apache-2.0
// The state of the job on this rank: running, broken or stopped. Broken and stopped are final.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace farandole {

class JobState {
 public:
  // ---- Any thread
  bool broken() const { return broken_; }
  bool stopped() const { return stopped_; }            // all ranks have left
  const Failure& failure() const { return failure_; }  // valid once broken
  // Makes the driver end the job with this, unless the log brings an earlier reason. Then wake the driver.
  void fail(Failure failure) {
    std::lock_guard lock(mutex_);
    if (!found_) found_ = std::move(failure);
    failing_ = true;
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
