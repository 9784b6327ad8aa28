// SPDX-License-Identifier: Apache-2.0
// Lets threads wait for the end of a runtime whose last reference another thread may hold.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "base/clock.h"
#include "base/error.h"
#include "lib/os/futex.h"

namespace farandole {

class ExitLatch {
 public:
  void tell() {
    gone_ = 1;
    futex_wake(gone_, std::numeric_limits<int>::max(), kFutexAnyBit);
  }
  // Returns false if the deadline has passed.
  bool await(Deadline deadline) const {
    while (gone_ == 0) {
      if (deadline.expired()) return false;
      futex_wait(gone_, 0, kFutexAnyBit, deadline);
    }
    return true;
  }

  Failure failure;  // result of leaving; farandole_shutdown() writes and reads it

 private:
  mutable std::atomic<uint32_t> gone_{0};
};

}  // namespace farandole
