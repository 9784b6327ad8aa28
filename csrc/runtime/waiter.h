// SPDX-License-Identifier: Apache-2.0
// Waits for calls, and explains what they wait for. Any thread.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <span>
#include <string>

#include "runtime/calls/rank_calls.h"
#include "runtime/driver.h"
#include "runtime/rank_watch.h"

namespace farandole {

enum class WaitEnd {
  kDone,
  kFailed,    // one call failed; see `failure`
  kTimeIsUp,  // or a signal came: run signal handlers, then wait again
};

class Waiter {
 public:
  Waiter(RankCalls& calls, Driver& driver, GpuBuckets& gpu, RankWatch& watch)
      : calls_(calls), driver_(driver), gpu_(gpu), watch_(watch) {}

  WaitEnd wait(std::span<const Handle> handles, Deadline deadline, Failure& failure);
  bool done(Handle handle);
  // Which ranks the call waits for, asked from the coordinator.
  std::string explain(Handle handle, Deadline deadline);

 private:
  // A question to rank 0, which a wait asks when it lasts; rank 0 need only answer.
  struct Probe {
    Deadline until;       // of the pause before it, then of the answer
    uint64_t number = 0;  // 0: not asked
  };
  void look_at_leader();
  // When to call it again; the caller waits for `handle`.
  Deadline probe_job_leader(Handle handle);
  void forget_probe(Handle handle);
  void give_up(Failure failure);
  // The number of a question about the call; 0: all ranks have submitted it.
  uint64_t inquire(Handle handle);

  RankCalls& calls_;
  Driver& driver_;
  GpuBuckets& gpu_;
  RankWatch& watch_;
  std::mutex probes_mutex_;
  std::map<Handle, Probe> probes_;  // by the first call of a wait, which may come in many slices
  std::atomic<bool> has_probes_ = false;
};

}  // namespace farandole
