// SPDX-License-Identifier: Apache-2.0
// The atomic operations through which the members of a cell meet. They are templates: Cell runs them on shared memory
// and futexes, and the model checker in tests/csrc runs them on a model of both.
//
// `State` offers atomic, sequentially consistent operations on one word: load(), replace(expected&, desired), wake()
// and sleep(expected, deadline). sleep() returns false if a signal arrived or the deadline passed.
//
// The word counts rounds. Each member arrives at most once per round. A round ends in one of two ways:
//   completed: the last member arrived and found that all members make the same call; or
//   dissolved: a member gave up, and all members that had arrived must make their call through the coordinator.
// The next round starts without arrivals. A completed round needs every member, so at most one round completes between
// two arrivals of a member. A member can therefore tell from the number of completed rounds how its own round ended,
// even if later rounds were dissolved. For the same reason, two places for data are enough: the parity of that number
// selects the place.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace farandole::cell_protocol {

constexpr uint32_t kArrived = 1;  // 8 bits: the number of members that have arrived
constexpr uint32_t kArrivedMask = 0xff;
constexpr uint32_t kAsleep = 1 << 8;     // at least one member is asleep
constexpr uint32_t kCompleted = 1 << 9;  // 7 bits: the number of completed rounds, modulo 128
constexpr uint32_t kCompletedMask = 0x7f * kCompleted;
constexpr uint32_t kDissolved = 1 << 16;  // 16 bits: the number of dissolved rounds
constexpr uint32_t kMostMembers = kArrivedMask;

enum class End { kUnderWay, kCompleted, kDissolved };

constexpr uint32_t arrived(uint32_t word) { return word & kArrivedMask; }
constexpr uint32_t parity(uint32_t word) { return word / kCompleted % 2; }
// Returns the numbers of completed and of dissolved rounds, which together identify a round.
constexpr uint32_t round_of(uint32_t word) { return word & ~(kArrivedMask | kAsleep); }
constexpr uint32_t after_completed(uint32_t word) {
  const uint32_t completed = (word + kCompleted) & kCompletedMask;
  return (round_of(word) & ~kCompletedMask) | completed;
}
constexpr uint32_t after_dissolved(uint32_t word) { return round_of(word) + kDissolved; }

constexpr End end_of(uint32_t round, uint32_t word) {
  if (round_of(word) == round) return End::kUnderWay;
  const bool completed = ((word ^ round) & kCompletedMask) != 0;
  return completed ? End::kCompleted : End::kDissolved;
}

// Ends the round of `word` and wakes its sleepers. If the shared word has changed, updates `word` and returns false.
template <class State>
bool end_round(State& state, uint32_t& word, uint32_t next) {
  const bool asleep = (word & kAsleep) != 0;
  if (!state.replace(word, next)) return false;
  if (asleep) state.wake();
  return true;
}

// Dissolves the round unless it has already ended. Returns how the round ended.
template <class State>
End give_up(State& state, uint32_t round) {
  uint32_t word = state.load();
  while (end_of(round, word) == End::kUnderWay) {
    if (end_round(state, word, after_dissolved(word))) return End::kDissolved;
  }
  return end_of(round, word);
}

// Dissolves the current round if a member has arrived. Call this after reporting a call that does not use the cell.
template <class State>
void disturb(State& state) {
  uint32_t word = state.load();
  while (arrived(word) > 0) {
    if (end_round(state, word, after_dissolved(word))) return;
  }
}

// Counts this member as arrived. Call this after writing this member's data. `agree()` returns true if all members make
// the same call. Sets `round` to the round in which this member arrived.
template <class State, class Agree>
End arrive(State& state, uint32_t members, uint32_t& round, Agree&& agree) {
  uint32_t word = state.load();
  for (;;) {
    round = round_of(word);
    if (arrived(word) + 1 < members) {
      if (state.replace(word, word + kArrived)) return End::kUnderWay;
      continue;
    }
    const bool alike = agree();
    if (!end_round(state, word, alike ? after_completed(word) : after_dissolved(word))) continue;
    return alike ? End::kCompleted : End::kDissolved;
  }
}

// Sleeps until the end of `round`, in which this member has arrived. Dissolves it at the deadline or after a signal.
template <class State>
End sleep_until_end(State& state, uint32_t round, Deadline deadline) {
  for (;;) {
    uint32_t word = state.load();
    const End end = end_of(round, word);
    if (end != End::kUnderWay) return end;
    if ((word & kAsleep) == 0 && !state.replace(word, word | kAsleep)) continue;
    if (!state.sleep(word | kAsleep, deadline)) return give_up(state, round);
  }
}

}  // namespace farandole::cell_protocol
