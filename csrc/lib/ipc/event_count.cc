// SPDX-License-Identifier: Apache-2.0
#include "lib/ipc/event_count.h"

#include <limits>

namespace farandole {
namespace {

std::atomic<uint64_t> g_rescued_wakeups{0};
std::atomic<std::chrono::nanoseconds> g_safety_timeout{std::chrono::seconds{1}};

}  // namespace

uint64_t rescued_wakeups() { return g_rescued_wakeups.load(); }

std::chrono::nanoseconds set_safety_timeout(std::chrono::nanoseconds timeout) {
  return g_safety_timeout.exchange(timeout);
}

void EventCount::close() {
  state_.word.fetch_or(kClosedBit);
  futex_wake(state_.word, std::numeric_limits<int>::max(), kFutexAnyBit);
}

void EventCount::State::wake(uint32_t bits) { futex_wake(word, 1, bits); }

FutexResult EventCount::State::sleep(uint32_t ticket, uint32_t bits, Deadline deadline) {
  return futex_wait(word, ticket, bits, deadline);
}

Deadline EventCount::State::safety() { return Deadline::in(g_safety_timeout.load()); }

void EventCount::State::rescued() { g_rescued_wakeups.fetch_add(1); }

}  // namespace farandole
