// SPDX-License-Identifier: Apache-2.0
// The order of operations that loses no wake-up, apart from what it runs on: EventCount runs it on
// shared memory and futexes, the model checker in tests/csrc on a model of both.
//
// `State` offers atomic, sequentially consistent steps:
//   load_word, load_flags, replace_flags(expected&, desired), set_flags, clear_flags, bump,
//   wake(bits), sleep(ticket, bits, deadline), grace() and rescued().
#pragma once

#include <cstdint>

#include "base/clock.h"
#include "lib/os/futex.h"

namespace farandole::event_protocol {

// Bits of the flags. The first two are futex bits as well.
constexpr uint32_t kCallerAsleep = 1;
constexpr uint32_t kBackgroundAsleep = 2;
constexpr uint32_t kDriven = 4;  // a thread drives, and looks again before it sleeps or leaves
constexpr uint32_t kAnySleeper = kCallerAsleep | kBackgroundAsleep;

// Takes the flag of the one sleeper to wake, among `kinds`; 0: nobody needs a wake-up. A caller goes
// first; the background thread is left alone while anybody drives.
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

// After publishing. Bumping before taking the flag would let a late notifier take the flag of a
// sleeper that has read the new word already: it would sleep for ever.
template <class State>
void notify(State& state, uint32_t kinds) {
  const uint32_t sleeper = take_sleeper(state, kinds);
  if (sleeper == 0) return;
  state.bump();
  state.wake(sleeper);
}

// One sleep. `ticket` is the word as loaded before: flag, look again, sleep while the word holds it.
template <class State, class Predicate>
FutexResult sleep(State& state, uint32_t sleeper, uint32_t ticket, Predicate&& has_work,
                  Deadline deadline) {
  FutexResult result = FutexResult::kChanged;
  state.set_flags(sleeper);
  if (!has_work()) {
    result = state.sleep(ticket, sleeper, deadline);
    // Work after a time-out: either the notifier is just about to wake us, or a wake-up was lost.
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

// Before a caller leaves: the wake-up that it took may have been meant for work that it will not do.
template <class State, class Predicate>
void pass_on(State& state, Predicate&& has_work) {
  if (has_work()) notify(state, kAnySleeper);
}

// Gives up the role first and looks again after: a notifier that saw the role taken woke nobody.
template <class State, class Predicate>
void stop_driving(State& state, Predicate&& has_work) {
  state.clear_flags(kDriven);
  pass_on(state, has_work);
}

}  // namespace farandole::event_protocol
