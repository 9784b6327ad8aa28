// SPDX-License-Identifier: Apache-2.0
// The one sleeping primitive: one per rank, in shared memory; zeroed memory is a valid EventCount.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/clock.h"
#include "lib/ipc/event_protocol.h"
#include "lib/os/futex.h"

namespace farandole {

enum class WaitResult {
  kWoken,        // look again; may be for no reason
  kTimedOut,     // the caller's deadline has passed and there is no work
  kInterrupted,  // a signal handler has run
  kClosed,       // close() was called, now or before
};

// Who sleeps: a user thread inside a blocking call, or the rank's own thread. At most one of each.
enum class Sleeper : uint32_t {
  kCaller = event_protocol::kCallerAsleep,
  kBackground = event_protocol::kBackgroundAsleep,
};

// Wake-ups that this process lost and only the safety timeout found: always 0, or there is a bug (or a
// peer died between two instructions).
uint64_t rescued_wakeups();

// The longest sleep, 1 s; for tests, where a lost wake-up shall be a hang. Returns what it was.
std::chrono::nanoseconds set_safety_timeout(std::chrono::nanoseconds timeout);

// The background thread: for (;;) { if (try_drive()) { work; stop_driving(has_work); }
//   wait(kBackground, prepare(), [&] { return has_work() && !driven(); }, deadline); }
// A caller: if (try_drive()) { until done: work, else wait(kCaller, prepare(), has_work, deadline);
//   stop_driving(has_work); } else { wait(kCaller, prepare(), [&] { return done() || (has_work() &&
//   !driven()); }, deadline); done or try again; before it leaves: pass_on(has_work); }
// A driving caller sleeps in wait() and nowhere else. tests/csrc/event_protocol_test.cc proves both.
class alignas(64) EventCount {
 public:
  EventCount() = default;
  EventCount(const EventCount&) = delete;
  EventCount& operator=(const EventCount&) = delete;

  // Any thread of any process, after publishing with seq_cst. A sleeping caller is woken, else nobody
  // if the rank is driven, else the background thread. No system call when nobody is woken.
  void notify() { event_protocol::notify(state_, event_protocol::kAnySleeper); }

  // Own process: work remains that no caller will do.
  void notify_background() { event_protocol::notify(state_, event_protocol::kBackgroundAsleep); }

  // Own process: the driver's role, a lock that is only ever tried. While it is taken no notifier wakes
  // the background thread, since the driver looks again before it sleeps or leaves.
  bool try_drive() { return event_protocol::try_drive(state_); }
  bool driven() const { return (state_.load_flags() & event_protocol::kDriven) != 0; }

  // Gives up the role, looks again, and wakes whoever should drive now if there is work.
  template <class Predicate>
  void stop_driving(Predicate&& has_work) {
    event_protocol::stop_driving(state_, has_work);
  }

  // A caller that has slept here without the role and leaves: hands on a wake-up that it may have taken.
  template <class Predicate>
  void pass_on(Predicate&& has_work) {
    event_protocol::pass_on(state_, has_work);
  }

  uint32_t prepare() const { return state_.load_word(); }

  // Sleeps once, for at most the safety timeout (then kWoken, so that a caller sees its signals). A notify() that found
  // no sleeper leaves no trace but the work: `has_work` must see all that may be announced, whatever was
  // looked at since prepare(). It loads with seq_cst, and is true only for what a notify() follows.
  template <class Predicate>
  WaitResult wait(Sleeper sleeper, uint32_t ticket, Predicate&& has_work, Deadline deadline);

  // Any process, for good: everybody wakes up, and nobody sleeps here any more.
  void close();
  bool closed() const { return (state_.load_word() & kClosedBit) != 0; }

 private:
  static constexpr uint32_t kClosedBit = 1;  // of the word; the sequence counts in steps of 2
  static constexpr std::chrono::milliseconds kGrace{1000};  // a notifier may be preempted for long

  struct State {
    std::atomic<uint32_t> word{0};
    std::atomic<uint32_t> flags{0};

    uint32_t load_word() const { return word.load(); }
    uint32_t load_flags() const { return flags.load(); }
    bool replace_flags(uint32_t& expected, uint32_t desired) {
      return flags.compare_exchange_weak(expected, desired);
    }
    uint32_t set_flags(uint32_t bits) { return flags.fetch_or(bits); }
    uint32_t clear_flags(uint32_t bits) { return flags.fetch_and(~bits); }
    void bump() { word.fetch_add(2); }
    void wake(uint32_t bits);
    FutexResult sleep(uint32_t ticket, uint32_t bits, Deadline deadline);
    static Deadline safety();
    static Deadline grace() { return Deadline::in(kGrace); }
    static void rescued();
  };

  State state_;
};

static_assert(std::is_standard_layout_v<EventCount> && sizeof(EventCount) == 64);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

template <class Predicate>
WaitResult EventCount::wait(Sleeper sleeper, uint32_t ticket, Predicate&& has_work,
                            Deadline deadline) {
  if ((ticket & kClosedBit) != 0) return WaitResult::kClosed;
  const Deadline until = std::min(deadline, State::safety());
  const FutexResult result =
      event_protocol::sleep(state_, static_cast<uint32_t>(sleeper), ticket, has_work, until);
  if (closed()) return WaitResult::kClosed;
  if (result == FutexResult::kInterrupted) return WaitResult::kInterrupted;
  if (deadline.expired() && !has_work()) return WaitResult::kTimedOut;
  return WaitResult::kWoken;
}

}  // namespace farandole
