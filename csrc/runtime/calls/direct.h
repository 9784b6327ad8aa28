// SPDX-License-Identifier: Apache-2.0
// The calls of a rank that it completes with its peers in cells, each in the thread that makes it. Part of RankCalls.
//
// Threads: all but meet() is called under the mutex of RankCalls. From enter() to leave() one thread of this rank
// occupies the cell of a set; between them, in meet(), it is without the mutex and touches only what it holds: its
// visit, its request and its submission. Every other call of the set comes after it, and so waits in clear(). That
// wait is short: clear() dissolves the round, and a thread that enters at this moment gives up after the cell's
// patience.
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
  };
  explicit DirectCalls(Setup setup) : setup_(setup) {}

  // A thread takes this into the cell.
  struct Visit {
    std::shared_ptr<Cell> cell;
    Cell::Call call;
    ProcessSet set;
  };

  // Tells the peers in the cell how many calls of this rank the coordinator settles. null: there is no such set.
  static void tell(const ProcessSet* set);

  // Occupies the cell in which this call may be completed. nullopt: it goes through the coordinator.
  std::optional<Visit> enter(const CheckedCall& call, const Submission& mine);
  // True: all members have met, and this rank's output is written. The submission has its handle.
  bool meet(const Visit& visit, const Request& request, Submission& mine);
  enum class Next {
    kEnded,   // it is completed, or fails with the job
    kReport,  // it goes through the coordinator
    kFails,   // its set was removed; who calls leave() fails it, without the mutex
  };
  // Ends the visit.
  Next leave(const Request& request, const Submission& mine, bool met);
  // Waits until no thread is in the set's cell; it reports first, because it came first.
  void clear(std::unique_lock<std::mutex>& lock, SetId id);
  // The same for all sets.
  void clear(std::unique_lock<std::mutex>& lock);
  // Any thread: how long ago the last call that was completed here began; -1: none was. It began before peers could go
  // on to their next one.
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
