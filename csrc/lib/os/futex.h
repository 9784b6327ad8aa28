// SPDX-License-Identifier: Apache-2.0
// Sleeps on words of shared memory. These functions also work across processes (without FUTEX_PRIVATE).
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace farandole {

enum class FutexResult {
  kWoken,
  kChanged,  // the word did not hold `expected`, so the call did not sleep
  kTimedOut,
  kInterrupted,  // a signal handler has run
};

constexpr uint32_t kFutexAnyBit = ~uint32_t{0};

// Sleeps, if the word holds `expected`, until a wake-up whose bits overlap `bits`. May return kWoken without a wake-up.
FutexResult futex_wait(std::atomic<uint32_t>& word, uint32_t expected, uint32_t bits,
                       Deadline deadline);

// Wakes at most `count` sleepers whose bits overlap `bits`. Returns the number of sleepers that it has woken.
int futex_wake(std::atomic<uint32_t>& word, int count, uint32_t bits);

}  // namespace farandole
