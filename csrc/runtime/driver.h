// SPDX-License-Identifier: Apache-2.0
// Who drives the engine: the rank's background thread, or a caller that waits anyway. The role is a lock that is
// only ever tried.
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
#include "runtime/spin.h"

namespace farandole {

class Driver {
 public:
  struct Setup {
    Engine& engine;
    RankCalls& calls;
    EventCount& bell;  // own
    MemberChannel& channel;
    bool leads;  // its host
    Spin spin;
    bool real_time;  // asked for
  };
  explicit Driver(Setup setup) : setup_(std::move(setup)) {}
  ~Driver() { stop(); }

  // Ends when the background thread runs as it was asked to.
  void start();
  // No thread drives any more; what this rank has to say is said.
  void stop();

  // ---- any thread
  void after_submit();
  // Drives if nobody else does, else sleeps, until done(). False: not yet: a signal came, or it is `deadline`.
  // done() throws on unknown handles.
  bool await(const std::function<bool()>& done, Deadline deadline);
  void ring() { setup_.bell.notify(); }
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
  std::atomic<bool> quit_{false};
  std::atomic<uint64_t> sleeps_{0};
  std::atomic<int64_t> sleeps_until_ns_{0};  // the background thread's last sleep; max: for ever
  std::latch scheduled_{1};
  std::thread thread_;
};

}  // namespace farandole
