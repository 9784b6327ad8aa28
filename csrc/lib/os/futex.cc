// SPDX-License-Identifier: Apache-2.0
#include "lib/os/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"

namespace farandole {

FutexResult futex_wait(std::atomic<uint32_t>& word, uint32_t expected, uint32_t bits,
                       Deadline deadline) {
  if (g_simulated_kernel) {
    if (word != expected) return FutexResult::kChanged;
    const bool woken = g_simulated_kernel->sleep(word, bits, deadline.ns());
    return woken ? FutexResult::kWoken : FutexResult::kTimedOut;
  }
  // Passes a timeout even for Deadline::never(). Without a timeout, the kernel restarts the call after a signal
  // handler, and the caller does not notice the signal.
  const timespec until = deadline.as_timespec();
  if (syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, &until, nullptr, bits) == 0) {
    return FutexResult::kWoken;
  }
  switch (errno) {
    case EAGAIN: return FutexResult::kChanged;
    case ETIMEDOUT: return FutexResult::kTimedOut;
    case EINTR: return FutexResult::kInterrupted;
    default: throw_system_error("cannot sleep on a futex", errno);
  }
}

int futex_wake(std::atomic<uint32_t>& word, int count, uint32_t bits) {
  if (g_simulated_kernel) return g_simulated_kernel->wake(word, count, bits);
  const long woken = syscall(SYS_futex, &word, FUTEX_WAKE_BITSET, count, nullptr, nullptr, bits);
  if (woken < 0) throw_system_error("cannot wake the sleepers of a futex", errno);
  return static_cast<int>(woken);
}

}  // namespace farandole
