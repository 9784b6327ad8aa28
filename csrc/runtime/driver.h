// SPDX-License-Identifier: Apache-2.0
// Runs the engine, on the rank's background thread or on a user thread that waits anyway; and so it is how users wait
// for calls. The driver's role is a lock that nobody blocks on.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <span>
#include <string>
#include <thread>

#include "base/clock.h"
#include "lib/ipc/event_count.h"
#include "runtime/calls/rank_calls.h"
#include "runtime/engine.h"
#include "runtime/rank_watch.h"

namespace farandole {

// Decides whether a thread polls for some microseconds before it sleeps: only if there are enough cores, and less and
// less often while polling finds nothing.
class Spin {
 public:
  // `setting_us`: FARANDOLE_SPIN_US; -1 decides by the cores available per local rank.
  Spin(int64_t setting_us, int local_ranks) {
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    waiting_ns_ = setting_us >= 0 ? setting_us * 1000 : (n >= 2 * local_ranks ? kLongest : 0);
    moving_ns_ = n >= local_ranks ? std::max(kLongest, waiting_ns_) : waiting_ns_;
  }

  // Polls; true as soon as `has_work` is. `moving`: a bucket is in flight, so peers will answer soon.
  template <class Predicate>
  bool operator()(bool moving, Predicate&& has_work) {
    int64_t limit = moving ? moving_ns_ : waiting_ns_;
    if (limit == 0 || skip_ > 0) {
      skip_ -= skip_ > 0;
      return false;
    }
    int64_t end = now_ns() + limit;
    do {
      for (int i = 0; i < kLooks; ++i) {
        if (has_work()) {
          misses_ = 0;
          return true;
        }
      }
      sched_yield();
    } while (now_ns() < end);
    misses_ = std::min(misses_ + 1, kMaxMisses);
    skip_ = (1 << misses_) - 1;
    return false;
  }

 private:
  static constexpr int64_t kLongest = 50'000;
  static constexpr int kLooks = 16;  // polls between two yields
  static constexpr int kMaxMisses = 6;
  int64_t waiting_ns_;
  int64_t moving_ns_;
  int misses_ = 0;
  int skip_ = 0;
};

enum class WaitEnd {
  kDone,
  kFailed,    // one call failed; see `failure`
  kTimeIsUp,  // or a signal came: run signal handlers, then wait again
};

class Driver {
 public:
  struct Setup {
    Engine& engine;
    RankCalls& calls;
    RankWatch& watch;
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
  WaitEnd wait(std::span<const Handle> handles, Deadline deadline, Failure& failure);
  bool done(Handle handle);
  // Which ranks the call waits for, asked from the coordinator.
  std::string explain(Handle handle, Deadline deadline);
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
  void look_at_leader();
  // When to call it again; the caller waits for `handle`, about which it asks.
  Deadline probe_job_leader(Handle handle);
  void give_up(Failure failure);
  // See RankCalls::ask().
  uint64_t ask(Handle handle);

  Setup setup_;
  std::atomic<bool> quit_{false};
  std::atomic<uint64_t> sleeps_{0};
  std::atomic<int64_t> sleeps_until_ns_{0};  // when the background thread wakes up; max: never
  std::latch scheduled_{1};
  std::thread thread_;
};

}  // namespace farandole
