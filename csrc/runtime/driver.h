// SPDX-License-Identifier: Apache-2.0
// Runs the engine: on the rank's background thread, or on a user thread that waits anyway. The driver's role
// is a lock that nobody blocks on.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <latch>
#include <thread>

#include "base/clock.h"
#include "lib/ipc/event_count.h"
#include "runtime/calls/rank_calls.h"
#include "runtime/engine/engine.h"
#include "runtime/heap_trimmer.h"
#include "runtime/spin.h"

namespace farandole {

class Driver {
 public:
  struct Setup {
    Engine& engine;
    RankCalls& calls;
    EventCount& wakeup;  // this rank's
    MemberChannel& channel;
    bool leads;  // this rank is its host's leader
    Spin spin;
    bool real_time;  // FARANDOLE_PRIORITY=realtime
  };
  explicit Driver(Setup setup) : setup_(std::move(setup)) {}
  ~Driver() { stop(); }

  // Returns once the background thread runs with its scheduling settings.
  void start();
  // Ends the background thread; then sends the reports that are still queued.
  void stop();

  // ---- Any thread
  void after_submit();
  // Until done(): drives if nobody else does, else sleeps. False: a signal came, or `deadline` passed. done()
  // may throw, on unknown handles.
  bool await(const std::function<bool()>& done, Deadline deadline);
  void ring() { setup_.wakeup.notify(); }
  uint64_t sleeps() const { return sleeps_; }

 private:
  struct Role;
  bool work_is_left() const;
  bool sleeps_past_tick() const;
  bool step();
  template <class Step>
  bool guarded(Step&& step);
  template <class Predicate>
  bool drive(Predicate&& done, Deadline deadline);
  void background();
  void ask_scheduler();

  Setup setup_;
  HeapTrimmer heap_;
  std::atomic<bool> quit_{false};
  std::atomic<uint64_t> sleeps_{0};
  std::atomic<int64_t> sleeps_until_ns_{0};  // when the background thread wakes up; max: never
  std::latch scheduled_{1};
  std::thread thread_;
};

}  // namespace farandole
