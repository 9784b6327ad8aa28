// SPDX-License-Identifier: Apache-2.0
// When to look at a wire that rings no bell: soon at first, then twice as late each time; and when it has been
// silent for too long.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace farandole {

class WirePatience {
 public:
  // silence_ns: without a message in the middle of a bucket; 0: for ever.
  explicit WirePatience(int64_t silence_ns) : silence_ns_(silence_ns) {}

  void start() { last_message_ = now_ns(), interval_ = kShortest; }
  // Something has moved: look again soon.
  void moved() { interval_ = kShortest; }
  void message() { last_message_ = now_ns(); }
  // Nothing has. False: it has been silent for too long.
  bool wait() {
    const int64_t now = now_ns();
    next_look_ = now + interval_;
    interval_ = std::min(2 * interval_, kLongest);
    return silence_ns_ == 0 || now - last_message_ < silence_ns_;
  }
  Deadline next_look() const { return Deadline::at(next_look_); }
  int64_t silence_ns() const { return silence_ns_; }

 private:
  static constexpr int64_t kShortest = 10'000;
  static constexpr int64_t kLongest = 200'000;
  const int64_t silence_ns_;
  int64_t interval_ = 0;      // until the next look
  int64_t next_look_ = 0;     // when, while there is nothing else to do
  int64_t last_message_ = 0;  // when one was complete, or a bucket began
};

}  // namespace farandole
