// SPDX-License-Identifier: Apache-2.0
// Gives the system back what malloc keeps of freed memory. Where arrays of random sizes come and go, glibc keeps more
// than twice what is in use, in holes between live ones, for as long as the job runs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>

#include "base/clock.h"

namespace farandole {

class HeapTrimmer {
 public:
  explicit HeapTrimmer(Deadline first = Deadline::in(kInterval)) : due_ns_(first.ns()) {}

  // Calls move: memory comes and goes. Any thread; costs a load.
  void used() {
    if (!used_.load(std::memory_order_relaxed)) used_.store(true, std::memory_order_relaxed);
  }
  // When to call trim(); never: nothing was used since the last time. Any thread.
  Deadline due() const {
    return used_.load(std::memory_order_relaxed) ? Deadline::at(due_ns_) : Deadline::never();
  }
  // Does nothing before that. One thread.
  void trim();

  // The clock's full ten seconds: ranks whose clocks agree hold up the same step.
  static constexpr std::chrono::nanoseconds kInterval = std::chrono::seconds(10);
  // How long nothing is trimmed after a trim that took so much of the CPU and gave back so much, which will be faulted in
  // again: both cost at most a five-hundredth of the time.
  static std::chrono::nanoseconds pause_after(std::chrono::nanoseconds took, size_t gave_back);

 private:
  std::atomic<bool> used_{false};
  std::atomic<int64_t> due_ns_;
};

}  // namespace farandole
