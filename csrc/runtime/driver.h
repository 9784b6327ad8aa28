// SPDX-License-Identifier: Apache-2.0
// Runs the engine, either on the background thread or on a user's thread that waits for a call. The thread that runs
// the engine is the driver, and is said to "drive". At most one thread drives at a time. A thread may try to become the
// driver, but never blocks for that.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <latch>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "lib/ipc/event_count.h"
#include "lib/os/spin.h"
#include "lib/os/thread.h"
#include "runtime/calls/rank_calls.h"
#include "runtime/engine.h"
#include "runtime/rank_watch.h"

namespace farandole {

enum class WaitEnd {
  kDone,
  kFailed,    // one call failed; see `failure`
  kTimeIsUp,  // the timeout passed or a signal came: run the signal handlers, then wait again
};

class Driver {
 public:
  struct Setup {
    Engine& engine;
    RankCalls& calls;
    RankWatch& watch;
    Wakeup wakeup;  // wakes this rank
    MemberChannel& channel;
    bool leads;  // this rank is its host's leader
    Spin caller_spin;
    Spin background_spin;
    bool real_time;  // FARANDOLE_PRIORITY=realtime
  };
  explicit Driver(Setup setup) : setup_(std::move(setup)) {}
  ~Driver() { stop(); }

  // Starts the background thread. Returns once that thread has made its scheduling settings.
  void start();
  // Ends the background thread, then sends reports that are still queued.
  void stop();

  // ---- Any thread
  void after_submit();
  // Like after_submit(), for a caller that only waits: informs other hosts about this rank's calls at once.
  void hurry();
  // If `endless` is true, the caller promises to repeat the wait until the calls have ended.
  WaitEnd wait(std::span<const Handle> handles, Deadline deadline, Failure& failure,
               bool endless = false);
  bool done(Handle handle);
  // Asks the coordinator which ranks the call waits for.
  std::string explain(Handle handle, Deadline deadline);
  // All waits use this function. Drives until done() returns true, or sleeps while another thread drives. Reports slow
  // buckets. Returns false if a signal came or `deadline` passed first. done() may throw.
  bool await(const std::function<bool()>& done, Deadline deadline);
  uint64_t sleeps() const { return sleeps_; }
  // True if a thread of this rank is the driver now.
  bool driven() const { return setup_.wakeup.driven(); }

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
  Deadline look();
  void probe();
  void ask_for_life(int64_t now);

  Setup setup_;
  std::atomic<bool> quit_{false};
  std::atomic<uint64_t> sleeps_{0};
  struct {
    std::atomic<int64_t> next_ns{0};  // time of a waiting caller's next probe
    std::mutex mutex;                 // guards everything below
    uint64_t heard = 0;               // number of log entries read
    int64_t asked_ns = 0;             // when rank 0 was asked for an entry; 0 if it was not asked
    bool warned = false;
  } probe_;
  std::atomic<int64_t> sleeps_until_ns_{0};  // when the background thread wakes up; max if never
  std::latch scheduled_{1};
  Thread thread_;
};

}  // namespace farandole
