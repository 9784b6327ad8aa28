// SPDX-License-Identifier: Apache-2.0
// Detects that a host's leader is stopped (SIGSTOP, a debugger). Used by ranks that wait for it: see Waiter.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/clock.h"
#include "lib/os/process.h"

namespace farandole {

class StoppedProcess {
 public:
  enum class Verdict { kMoves, kWarn, kGiveUp };
  // Limits in nanoseconds; 0: never. `pid` 0: the process is not visible from here.
  StoppedProcess(int rank, pid_t pid, int64_t warn_ns, int64_t give_up_ns);

  // When a waiter should check next; never: nothing to check.
  Deadline next_look() const {
    return pid_ == 0 ? Deadline::never() : Deadline::at(looked_ns_ + period_ns_);
  }
  // kWarn and kGiveUp are returned once for each time that it stops. Any thread.
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
  int64_t since_ns_ = -1;  // it was stopped at every check since then; -1: not stopped
  bool warned_ = false;
};

}  // namespace farandole
