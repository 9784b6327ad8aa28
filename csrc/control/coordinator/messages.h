// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks. A send and its receive become one call of their pair: a process set of the two ranks,
// made at their first message.
#pragma once

#include "control/coordinator/open_calls.h"
#include "control/coordinator/publisher.h"
#include "control/coordinator/stall_monitor.h"

namespace farandole {

class Messages {
 public:
  Messages(Shared& shared, Publisher& publisher, StallMonitor& stalls)
      : shared_(shared), publisher_(publisher), stalls_(stalls) {}

  // Throws Error(kInternal) if a correct rank would not send the post.
  void post(Rank from, const Post& post, int64_t now_ns);
  // A member has joined: fails posts in the set that no rank can match any more.
  void join(const SetState& set);
  // A member has left: does the same as join(), and fails the member's own posts in the set.
  void leave(const SetState& set, Rank from);

 private:
  void meet(const Posted& sent, const Posted& received, int64_t now_ns);

  Shared& shared_;
  Publisher& publisher_;
  StallMonitor& stalls_;
};

}  // namespace farandole
