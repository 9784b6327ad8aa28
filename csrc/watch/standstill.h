// SPDX-License-Identifier: Apache-2.0
// Whether the process that everybody needs stands still: its waiters look themselves, because it can't say.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/clock.h"
#include "lib/os/process.h"

namespace farandole {

class Standstill {
 public:
  enum class Verdict { kMoves, kWarn, kGiveUp };
  // Limits in nanoseconds; 0: never. pid 0: a process that can't be seen from here.
  Standstill(int rank, pid_t pid, int64_t warn_ns, int64_t give_up_ns);

  // When a waiter should look next; never: there is nothing to see.
  Deadline next_look() const {
    return pid_ == 0 ? Deadline::never() : Deadline::at(looked_ns_ + period_ns_);
  }
  // kWarn and kGiveUp once for each standstill. Any thread.
  Verdict look();
  bool stands() const { return pid_ != 0 && is_stopped(pid_); }
  std::string text() const;

 private:
  const int rank_;
  const pid_t pid_;
  const int64_t warn_ns_;
  const int64_t give_up_ns_;
  const int64_t period_ns_;
  std::atomic<int64_t> looked_ns_;
  std::mutex mutex_;
  int64_t since_ns_ = -1;  // it stood still at every look from then on
  bool warned_ = false;
};

}  // namespace farandole
