// SPDX-License-Identifier: Apache-2.0
// The end of a runtime as those see it who wait for it: some other thread may let go of it last.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "base/clock.h"
#include "base/error.h"
#include "lib/os/futex.h"

namespace farandole {

class Departure {
 public:
  void tell() {
    gone_ = 1;
    futex_wake(gone_, std::numeric_limits<int>::max(), kFutexAnyBit);
  }
  // False: the deadline has passed.
  bool await(Deadline deadline) const {
    while (gone_ == 0) {
      if (deadline.expired()) return false;
      futex_wait(gone_, 0, kFutexAnyBit, deadline);
    }
    return true;
  }

  Failure failure;  // what leaving came to; set before the last but one lets go

 private:
  mutable std::atomic<uint32_t> gone_{0};
};

}  // namespace farandole
