// SPDX-License-Identifier: Apache-2.0
// Decides if, and for how long, a thread polls before it sleeps. No other code decides this.
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace farandole {

// A thread polls and yields in turns while it is alone on its core. A long yield shows that another thread wants the
// core. The polling thread then sleeps in this wait and in the next few waits, without polling. Each polling thread has
// its own object. If ranks share cores, a caller yields after each look, because the peer for which it waits may need
// this core, and yielding costs less than sleeping. In that case, a yield counts as long only if it takes much longer
// than a peer needs for its share of a small call.
class Spin {
 public:
  // A caller has nothing else to do. The background thread, however, takes a core that the program may need. The
  // background thread therefore polls only if there are spare cores, and polls less often the longer it finds no work.
  enum class Who { kCaller, kBackground };

  // `setting_us` is FARANDOLE_SPIN_US. If it is -1, the limits depend on `cores`, the number of cores that the host's
  // ranks share.
  Spin(Who who, int64_t setting_us, int cores, int local_ranks)
      : backs_off_(who == Who::kBackground) {
    const bool crowded = cores < local_ranks;
    const bool calls = who == Who::kCaller;
    const int64_t longest = calls ? kLongestCall : kLongest;
    const int wanted = calls ? local_ranks : 2 * local_ranks;
    waiting_ns_ = setting_us >= 0 ? setting_us * 1000 : (cores >= wanted ? longest : 0);
    moving_ns_ = crowded ? waiting_ns_ : std::max(setting_us < 0 ? longest : kLongest, waiting_ns_);
    if (crowded && calls) {
      if (setting_us < 0) waiting_ns_ = moving_ns_ = kLongestCrowded;
      looks_ = 1;
      long_yield_ns_ = kLongYieldCrowded;
    }
  }

  // Polls. Returns true as soon as has_work() does, or false after a while. `moving` is true if a bucket is in flight.
  template <class Predicate>
  bool operator()(bool moving, Predicate&& has_work) {
    const int64_t limit = moving ? moving_ns_ : waiting_ns_;
    if (limit == 0 || skip_ > 0) {
      skip_ -= skip_ > 0;
      return false;
    }
    int64_t now = now_ns();
    const int64_t end = now + limit;
    bool alone = true;
    while (alone && now < end) {
      for (int i = 0; i < looks_; ++i) {
        if (has_work()) {
          misses_ = 0;
          return true;
        }
      }
      const int64_t before = now_ns();
      sched_yield();
      now = now_ns();
      alone = now - before < long_yield_ns_;
    }
    if (alone && !backs_off_) return false;
    misses_ = std::min(misses_ + 1, kMaxMisses);
    skip_ = (1 << misses_) - 1;
    return false;
  }

 private:
  static constexpr int64_t kLongest = 50'000;
  // Covers the differences between the times at which ranks make a call, after a few milliseconds of computing.
  static constexpr int64_t kLongestCall = 300'000;
  static constexpr int64_t kLongestCrowded = 100'000;
  static constexpr int64_t kLongYieldCrowded = 1'000'000;
  static constexpr int kMaxMisses = 6;
  int looks_ = 16;                  // number of looks between two yields
  int64_t long_yield_ns_ = 20'000;  // a yield takes 1 us if no other thread wants the core
  bool backs_off_;
  int64_t waiting_ns_;
  int64_t moving_ns_;
  int misses_ = 0;
  int skip_ = 0;
};

}  // namespace farandole
