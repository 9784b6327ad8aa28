// SPDX-License-Identifier: Apache-2.0
// Calls that a rank completes with its peers in cells, each in the thread that makes the call. Part of RankCalls.
//
// The caller holds RankCalls::mutex_, except in meet(). From enter() to leave(), one thread of this rank occupies the
// set's cell. In meet(), that thread uses only its Visit, request and submission. Meanwhile, other threads that make
// calls in the set wait in clear(). These waits are short: clear() dissolves the round, and a thread that has entered
// but not yet arrived in the round leaves after kCellPatience.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "base/clock.h"
#include "data/shm/cell.h"
#include "runtime/calls/handles.h"
#include "runtime/calls/job_state.h"
#include "runtime/calls/memory_in_use.h"
#include "runtime/calls/request_checks.h"
#include "runtime/calls/tables.h"

namespace farandole {

class DirectCalls {
 public:
  struct Setup {
    Handles& handles;
    JobState& job;
    Recorder& recorder;
    PendingTable& pending;
    ProcessSets& sets;
    MemoryInUse& memory;
  };
  explicit DirectCalls(Setup setup) : setup_(setup) {}

  // A thread's state in the cell.
  struct Visit {
    std::shared_ptr<Cell> cell;
    Cell::Call call;
    ProcessSet set;
  };

  // Calls Cell::tell() for the set. Does nothing if `set` is null.
  static void tell(const ProcessSet* set);

  // Occupies the cell in which this call may complete. Returns nullopt if the call must go through the coordinator.
  // `mine` must already have its handle. If enter() throws, the cell is free.
  std::optional<Visit> enter(const CheckedCall& call, const Submission& mine);
  // Returns true if all members have met and this rank's output is written.
  bool meet(const Visit& visit, const Request& request, Submission& mine);
  enum class Next {
    kEnded,   // the call has completed, or fails with the job
    kReport,  // the caller must make the call through the coordinator
    kFails,   // the set was removed; the caller must fail the call after it has released the mutex
  };
  Next leave(const Request& request, const Submission& mine, bool met);
  // Waits until no thread of this rank is in the set's cell, so that a thread that came earlier reports first. Without
  // an id, waits for the cells of all sets.
  void clear(std::unique_lock<std::mutex>& lock, SetId id);
  void clear(std::unique_lock<std::mutex>& lock);
  // Time since this rank's last completed call in a cell started, or -1 if there is none. Any thread may call this.
  int64_t ago_ns() const {
    const int64_t last = last_ns_;
    return last < 0 ? -1 : now_ns() - last;
  }

 private:
  const Setup setup_;
  std::condition_variable left_;
  std::atomic<int64_t> last_ns_{-1};
};

}  // namespace farandole
