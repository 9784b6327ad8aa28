// SPDX-License-Identifier: Apache-2.0
// Lets threads wait until a runtime is destroyed, because another thread may hold the last reference to the runtime.
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

  Failure failure;  // result of Runtime::leave(), for farandole_shutdown()

 private:
  mutable std::atomic<uint32_t> gone_{0};
};

}  // namespace farandole
