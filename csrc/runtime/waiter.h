// SPDX-License-Identifier: Apache-2.0
// Waiting for calls, and why it takes so long. Any thread.
#pragma once

#include <span>
#include <string>

#include "runtime/calls/rank_calls.h"
#include "runtime/driver.h"
#include "runtime/rank_watch.h"

namespace farandole {

enum class WaitEnd {
  kDone,
  kFailed,    // one of them; `failure` says how
  kTimeIsUp,  // or a signal came: let handlers run, then wait again
};

class Waiter {
 public:
  Waiter(RankCalls& calls, Driver& driver, GpuBuckets& gpu, RankWatch& watch)
      : calls_(calls), driver_(driver), gpu_(gpu), watch_(watch) {}

  WaitEnd wait(std::span<const Handle> handles, Deadline deadline, Failure& failure);
  bool done(Handle handle);
  // Whom the call behind `handle` waits for, as the coordinator knows it.
  std::string explain(Handle handle, Deadline deadline);

 private:
  void look_at_leader();

  RankCalls& calls_;
  Driver& driver_;
  GpuBuckets& gpu_;
  RankWatch& watch_;
};

}  // namespace farandole
