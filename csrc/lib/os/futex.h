// SPDX-License-Identifier: Apache-2.0
// Sleeping on a word of shared memory. Non-private: sleepers and wakers may be other processes.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace farandole {

enum class FutexResult {
  kWoken,
  kChanged,  // the word no longer held `expected`: did not sleep
  kTimedOut,
  kInterrupted,  // a signal handler has run
};

constexpr uint32_t kFutexAnyBit = ~uint32_t{0};

// Sleeps while the word holds `expected`, until a wake-up that shares a bit with `bits`. May wake for
// no reason.
FutexResult futex_wait(std::atomic<uint32_t>& word, uint32_t expected, uint32_t bits,
                       Deadline deadline);

// Wakes at most `count` sleepers that share a bit with `bits`, in one call; returns how many.
int futex_wake(std::atomic<uint32_t>& word, int count, uint32_t bits);

}  // namespace farandole
