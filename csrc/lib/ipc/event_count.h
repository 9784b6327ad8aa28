// SPDX-License-Identifier: Apache-2.0
// The EventCount on which a rank's threads sleep: one per rank, in shared memory. Zeroed memory is a valid EventCount.
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

// A thread that may sleep here: the user's thread that drives the engine, or the background thread. At most one thread
// of each kind sleeps here.
enum class Sleeper : uint32_t {
  kCaller = event_protocol::kCallerAsleep,
  kBackground = event_protocol::kBackgroundAsleep,
};

inline std::atomic<uint64_t> g_rescued_wakeups{0};
// Number of wake-ups that this process missed and noticed only when a sleep timed out. It should be 0; otherwise there
// is a bug, or a peer died inside notify().
inline uint64_t rescued_wakeups() { return g_rescued_wakeups.load(); }

// The two words in shared memory. Wakeup uses them.
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

// File descriptors by which this process wakes a rank's threads, if other hosts can send to that rank. Its threads then
// sleep in a Poller. The threads of other ranks sleep on the word itself.
struct Bells {
  std::array<int, Poller::kBells> fds = {-1, -1};
  Poller* poller = nullptr;  // null: the sleepers belong to another process
};

// This process's access to one rank's EventCount. The rank's own threads use it as follows.
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
// A driving caller sleeps only in wait(). tests/csrc/lib/ipc/event_protocol_test.cc proves both loops.
class Wakeup {
 public:
  Wakeup(EventCount& count, const Bells& bells = {}) : state_{&count.word_, &count.flags_, bells} {}

  // Call after publishing work with seq_cst, from any thread of any process. Wakes a sleeping caller. If no caller
  // sleeps and no thread drives, wakes the background thread. Makes no system call if it wakes no thread.
  void notify() { event_protocol::notify(state_, event_protocol::kAnySleeper); }

  // Wakes the background thread for work that no caller will do. Own process only.
  void notify_background() { event_protocol::notify(state_, event_protocol::kBackgroundAsleep); }

  // Tries to become the driver; never blocks. Own process only. While a thread drives, notify() does not wake the
  // background thread, because the driver checks for work before it sleeps or stops driving.
  bool try_drive() { return event_protocol::try_drive(state_); }
  bool driven() const { return (state_.load_flags() & event_protocol::kDriven) != 0; }

  // Stops driving, then checks for work and wakes the thread that should drive now.
  template <class Predicate>
  void stop_driving(Predicate&& has_work) {
    event_protocol::stop_driving(state_, has_work);
  }

  // While this object exists, data from other hosts wakes only the caller that drives.
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

  // Sleeps once, for at most a second, so that a caller can handle signals. Check for work afterwards. False: a signal
  // handler has run. `ticket`: from prepare(). `has_work` must load with seq_cst. It must be true exactly if work was
  // published since prepare(), or a socket of the Poller changed, because notify() leaves no trace if it finds no
  // sleeper.
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
      // Need not check the word: if the bell has rung already, sleep() returns immediately.
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
