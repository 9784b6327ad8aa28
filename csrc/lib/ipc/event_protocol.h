// SPDX-License-Identifier: Apache-2.0
// The atomic operations of an EventCount, in an order that loses no wake-up. They are templates: Wakeup runs them on
// shared memory and futexes, and the model checker in tests/csrc runs them on a model of both.
//
// `State` offers atomic, sequentially consistent operations: load_word, load_flags, replace_flags(expected&, desired),
// set_flags, clear_flags, bump, wake(bits), sleep(ticket, bits, deadline), grace() and rescued().
#pragma once

#include <cstdint>

#include "base/clock.h"
#include "lib/os/futex.h"

namespace farandole::event_protocol {

// Bits of the flags. The first two bits are also used as futex wait bits.
constexpr uint32_t kCallerAsleep = 1;
constexpr uint32_t kBackgroundAsleep = 2;
constexpr uint32_t kDriven = 4;  // a thread drives; see Wakeup::try_drive()
constexpr uint32_t kAnySleeper = kCallerAsleep | kBackgroundAsleep;

// Chooses which sleeper among `kinds` to wake: a caller or, if no caller sleeps and no thread drives, the background
// thread. Clears and returns the flag of this sleeper, or returns 0 if there is none.
template <class State>
uint32_t take_sleeper(State& state, uint32_t kinds) {
  uint32_t flags = state.load_flags();
  for (;;) {
    uint32_t sleeper = flags & kinds & kCallerAsleep;
    if (sleeper == 0 && (flags & kDriven) == 0) sleeper = flags & kinds & kBackgroundAsleep;
    if (sleeper == 0) return 0;
    if (state.replace_flags(flags, flags & ~sleeper)) return sleeper;
  }
}

// Call this after publishing work. notify() takes the sleeper's flag before it bumps the word. In the opposite order,
// it could take the flag of a sleeper that has already read the new word. Later wake-ups would then not reach that
// sleeper.
template <class State>
void notify(State& state, uint32_t kinds) {
  const uint32_t sleeper = take_sleeper(state, kinds);
  if (sleeper == 0) return;
  state.bump();
  state.wake(sleeper);
}

// Sleeps once: sets the flag, checks for work, then sleeps while the word equals `ticket`, which was loaded earlier.
template <class State, class Predicate>
FutexResult sleep(State& state, uint32_t sleeper, uint32_t ticket, Predicate&& has_work,
                  Deadline deadline) {
  FutexResult result = FutexResult::kChanged;
  state.set_flags(sleeper);
  if (!has_work()) {
    result = state.sleep(ticket, sleeper, deadline);
    // If there is work after a timeout, either a notifier is about to wake this thread, or a wake-up was lost.
    if (result == FutexResult::kTimedOut && has_work()) {
      result = state.sleep(ticket, sleeper, state.grace());
      if (result == FutexResult::kTimedOut) state.rescued();
    }
  }
  state.clear_flags(sleeper);
  return result;
}

template <class State>
bool try_drive(State& state) {
  return (state.set_flags(kDriven) & kDriven) == 0;
}

// Clears kDriven before it checks for work. A notifier that saw kDriven may have woken nobody, so a check before the
// flag is cleared could miss that notifier's work.
template <class State, class Predicate>
void stop_driving(State& state, Predicate&& has_work) {
  state.clear_flags(kDriven);
  if (has_work()) notify(state, kAnySleeper);
}

}  // namespace farandole::event_protocol
