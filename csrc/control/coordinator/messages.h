// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks. A send and its receive become one call of a pair. The pair is a process set of the two
// ranks, which is created at their first message.
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
  // Call this when a member has joined. Makes posts in the set fail if no rank can match them any more.
  void join(const SetState& set);
  // Call this when a member has left. Does the same as join(), and also makes the member's own posts in the set fail,
  // except those that it refused.
  void leave(const SetState& set, Rank from);

 private:
  void meet(const Posted& sent, const Posted& received, int64_t now_ns);

  Shared& shared_;
  Publisher& publisher_;
  StallMonitor& stalls_;
};

}  // namespace farandole
