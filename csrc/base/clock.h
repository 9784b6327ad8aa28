// SPDX-License-Identifier: Apache-2.0
// Monotonic time in nanoseconds, and the absolute deadlines that every blocking call takes.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <compare>
#include <cstdint>
#include <limits>

#include "base/simulated_kernel.h"

namespace farandole {

// Reads CLOCK_MONOTONIC, which is comparable between the processes of a host and is never set back.
inline int64_t now_ns() {
  if (g_simulated_kernel) [[unlikely]]
    return g_simulated_kernel->now_ns();
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Returns nanoseconds since 1970. Users and NTP may set this clock forward or back.
inline int64_t epoch_ns() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Converts seconds to nanoseconds. Clamps the argument to the range from 0 to 1e9 seconds.
inline std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(std::clamp(seconds, 0.0, 1e9) * 1e9));
}

class Deadline {
 public:
  static constexpr Deadline never() { return Deadline(std::numeric_limits<int64_t>::max()); }
  static constexpr Deadline at(int64_t ns) { return Deadline(ns); }
  static Deadline in(std::chrono::nanoseconds delay) {
    const int64_t now = now_ns();
    return delay.count() >= never().ns_ - now ? never() : Deadline(now + delay.count());
  }

  int64_t ns() const { return ns_; }
  bool is_never() const { return ns_ == never().ns_; }
  bool expired() const { return !is_never() && now_ns() >= ns_; }
  timespec as_timespec() const { return {ns_ / 1'000'000'000, ns_ % 1'000'000'000}; }

  // Returns the milliseconds left for poll(), or -1 for never(). Rounds up, so that poll() never returns early.
  int poll_ms() const {
    if (is_never()) return -1;
    const int64_t left = std::max<int64_t>(ns_ - now_ns(), 0);
    constexpr int64_t kLongest = std::numeric_limits<int>::max();
    return static_cast<int>(std::min((left + 999'999) / 1'000'000, kLongest));
  }

  auto operator<=>(const Deadline&) const = default;

 private:
  explicit constexpr Deadline(int64_t ns) : ns_(ns) {}
  int64_t ns_;
};

}  // namespace farandole
