// SPDX-License-Identifier: Apache-2.0
// Decides whether a thread polls for some microseconds before it sleeps: only if there are enough cores, and
// less and less often while polling finds nothing. Used by Driver.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace farandole {

class Spin {
 public:
  // `setting_us`: FARANDOLE_SPIN_US; -1 decides by the cores available per local rank.
  Spin(int64_t setting_us, int local_ranks) {
    cpu_set_t cores;
    int n = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    waiting_ns_ = setting_us >= 0 ? setting_us * 1000 : (n >= 2 * local_ranks ? kLongest : 0);
    moving_ns_ = n >= local_ranks ? std::max(kLongest, waiting_ns_) : waiting_ns_;
  }

  // Polls; true as soon as `has_work` is. `moving`: a bucket is in flight, so peers will answer soon.
  template <class Predicate>
  bool operator()(bool moving, Predicate&& has_work) {
    int64_t limit = moving ? moving_ns_ : waiting_ns_;
    if (limit == 0 || skip_ > 0) {
      skip_ -= skip_ > 0;
      return false;
    }
    int64_t end = now_ns() + limit;
    do {
      for (int i = 0; i < kLooks; ++i) {
        if (has_work()) {
          misses_ = 0;
          return true;
        }
      }
      sched_yield();
    } while (now_ns() < end);
    misses_ = std::min(misses_ + 1, kMaxMisses);
    skip_ = (1 << misses_) - 1;
    return false;
  }

 private:
  static constexpr int64_t kLongest = 50'000;
  static constexpr int kLooks = 16;  // polls between two yields
  static constexpr int kMaxMisses = 6;
  int64_t waiting_ns_;
  int64_t moving_ns_;
  int misses_ = 0;
  int skip_ = 0;
};

}  // namespace farandole
