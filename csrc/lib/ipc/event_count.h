// SPDX-License-Identifier: Apache-2.0
// The EventCount on which a rank's threads sleep, one per rank, in shared memory. Zeroed memory is a valid EventCount.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "base/clock.h"
#include "lib/ipc/event_protocol.h"
#include "lib/os/futex.h"
#include "lib/os/poller.h"

namespace farandole {

// A thread that may sleep here: either the user's thread that drives the engine, or the background thread. At most one
// thread of each kind sleeps here.
enum class Sleeper : uint32_t {
  kCaller = event_protocol::kCallerAsleep,
  kBackground = event_protocol::kBackgroundAsleep,
};

inline std::atomic<uint64_t> g_rescued_wakeups{0};
// Number of wake-ups that this process missed and noticed only when a sleep timed out. If it is not 0, there is a bug,
// or a peer died inside notify().
inline uint64_t rescued_wakeups() { return g_rescued_wakeups.load(); }

// The two words in shared memory. They are accessed through Wakeup.
class alignas(64) EventCount {
 public:
  EventCount() = default;
  EventCount(const EventCount&) = delete;
  EventCount& operator=(const EventCount&) = delete;

 private:
  friend class Wakeup;
  std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> flags_{0};
};

// If other hosts can send to a rank, the rank's threads sleep in a Poller, and this process wakes them through these
// file descriptors. The threads of any other rank sleep on the futex word.
struct Bells {
  std::array<int, Poller::kBells> fds = {-1, -1};
  Poller* poller = nullptr;  // null if the sleepers belong to another process
};

// This process's access to one rank's EventCount. The threads of that rank use it as follows.
//
// Background thread:
//   for (;;) {
//     if (try_drive()) {
//       work;
//       stop_driving(has_work);
//     }
//     wait(kBackground, prepare(), [&] { return has_work() && !driven(); }, deadline);
//   }
//
// Caller:
//   if (try_drive()) {
//     until done: work, else wait(kCaller, prepare(), has_work, deadline);
//     stop_driving(has_work);
//   } else {
//     sleep elsewhere until the driver has finished this caller's call;
//   }
//
// A caller that drives sleeps only in wait(). tests/csrc/lib/ipc/event_protocol_test.cc proves both loops correct.
class Wakeup {
 public:
  Wakeup(EventCount& count, const Bells& bells = {}) : state_{&count.word_, &count.flags_, bells} {}

  // Call this after publishing work with seq_cst, from any thread of any process. Wakes a sleeping caller. If no caller
  // sleeps and no thread drives, wakes the background thread. Makes no system call if there is no thread to wake.
  void notify() { event_protocol::notify(state_, event_protocol::kAnySleeper); }

  // Wakes the background thread for work that no caller will do. Call this only in the rank's own process.
  void notify_background() { event_protocol::notify(state_, event_protocol::kBackgroundAsleep); }

  // Tries to become the driver, without blocking. Call this only in the rank's own process. While a thread drives,
  // notify() does not wake the background thread, because the driver checks for work before it sleeps or stops driving.
  bool try_drive() { return event_protocol::try_drive(state_); }
  bool driven() const { return (state_.load_flags() & event_protocol::kDriven) != 0; }

  // Stops driving, then checks for work and wakes the thread that should drive next.
  template <class Predicate>
  void stop_driving(Predicate&& has_work) {
    event_protocol::stop_driving(state_, has_work);
  }

  // While this object exists, data from other hosts wakes only the caller that is driving.
  class Muted {
   public:
    explicit Muted(Wakeup wakeup) : poller_(wakeup.state_.bells.poller) { set(true); }
    ~Muted() { set(false); }
    Muted(const Muted&) = delete;
    Muted& operator=(const Muted&) = delete;

   private:
    void set(bool on) {
      if (poller_) poller_->mute(on);
    }
    Poller* const poller_;
  };

  uint32_t prepare() const { return state_.load_word(); }

  // Sleeps once, for at most a second, so that a caller can handle signals. Check for work afterwards. Returns false if
  // a signal handler has run. `ticket` is a result of prepare(). `has_work` must load with seq_cst. It must return true
  // if and only if work was published since prepare() or a socket of the Poller has changed, because notify() leaves no
  // trace if it finds no sleeper.
  template <class Predicate>
  bool wait(Sleeper sleeper, uint32_t ticket, Predicate&& has_work, Deadline deadline) {
    const Deadline until = std::min(deadline, Deadline::in(kLongestSleep));
    return event_protocol::sleep(state_, static_cast<uint32_t>(sleeper), ticket, has_work, until) !=
           FutexResult::kInterrupted;
  }

 private:
  static constexpr std::chrono::seconds kLongestSleep{1};
  static constexpr std::chrono::seconds kGrace{1};  // a notifier may be preempted before waking us

  struct State {
    std::atomic<uint32_t>* word;
    std::atomic<uint32_t>* flags;
    Bells bells;

    uint32_t load_word() const { return word->load(); }
    uint32_t load_flags() const { return flags->load(); }
    bool replace_flags(uint32_t& expected, uint32_t desired) {
      return flags->compare_exchange_weak(expected, desired);
    }
    uint32_t set_flags(uint32_t bits) { return flags->fetch_or(bits); }
    uint32_t clear_flags(uint32_t bits) { return flags->fetch_and(~bits); }
    void bump() { word->fetch_add(1); }
    static Poller::Bell bell_of(uint32_t bits) {
      return bits == event_protocol::kCallerAsleep ? Poller::kDriver : Poller::kOther;
    }
    void wake(uint32_t bits) {
      const int fd = bells.fds[bell_of(bits)];
      if (fd < 0) {
        futex_wake(*word, 1, bits);
      } else {
        ring_bell(fd);
      }
    }
    FutexResult sleep(uint32_t ticket, uint32_t bits, Deadline deadline) {
      if (!bells.poller) return futex_wait(*word, ticket, bits, deadline);
      // There is no need to check the word: if the bell has already rung, sleep() returns immediately.
      return bells.poller->sleep(bell_of(bits), deadline);
    }
    static Deadline grace() { return Deadline::in(kGrace); }
    static void rescued() { g_rescued_wakeups.fetch_add(1); }
  };

  State state_;
};

static_assert(std::is_standard_layout_v<EventCount> && sizeof(EventCount) == 64);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace farandole
