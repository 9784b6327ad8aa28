// SPDX-License-Identifier: Apache-2.0
// Puts into words which calls wait for which ranks, and why ranks that wait for each other never meet. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "control/protocol/message.h"

namespace farandole {

// A call that waits for ranks, as people read of it.
struct WaitingCall {
  std::string what;           // "'grad.w' (allreduce)"
  std::vector<Rank> here;     // have submitted it; joined ranks excluded
  std::vector<Rank> missing;  // have not
  int64_t since_ns = 0;
  bool moving = false;  // all have submitted it; its bytes don't move, `missing` don't answer
  CallKey key = {};
};

// Calls in which the same ranks wait for the same others; none is empty. The oldest comes first.
using CallGroup = std::vector<const WaitingCall*>;
std::vector<CallGroup> grouped(std::span<const WaitingCall> calls);
// "200 gradients of optimizer.0: rank 0 waiting for 10 s, rank 1 missing"; `now_ns` < 0: without the time.
std::string line_of(const CallGroup& group, int64_t now_ns);

// A rank whose main thread waits in `call`; `stack` is its report's text.
struct BlockedRank {
  Rank rank = 0;
  const WaitingCall* call = nullptr;
  std::string stack;
};
// One line: where ranks are that wait for each other, and the likely cause. Empty: `blocked` is.
std::string diagnosis_of(std::span<const BlockedRank> blocked);

}  // namespace farandole
