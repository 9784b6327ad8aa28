// SPDX-License-Identifier: Apache-2.0
// The first failure on a wire, withheld for 1 s, because the coordinator's Abort usually comes in that time
// and gives a better reason.
#pragma once

#include <chrono>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/types.h"

namespace farandole {

class WireFault {
 public:
  void set(Rank rank, const std::string& host, const std::string& by, const std::string& why) {
    if (failure_) return;
    failure_ = {ErrorCode::kPeer,
                "rank " + std::to_string(rank) + " on " + host + " can't be reached by " + by +
                    " any more (" + why +
                    "): that rank died, or the network between the hosts is down"};
    due_ = Deadline::in(kControlDue);
  }
  // True: there is a failure. Throws it once its time has come.
  bool check() const {
    if (failure_ && due_.expired()) throw Error(failure_.code, failure_.text);
    return static_cast<bool>(failure_);
  }

 private:
  static constexpr std::chrono::seconds kControlDue{1};
  Failure failure_;
  Deadline due_ = Deadline::never();
};

}  // namespace farandole
