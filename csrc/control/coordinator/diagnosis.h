// SPDX-License-Identifier: Apache-2.0
// Explains in words which calls wait for which ranks, and why ranks that wait for each other never meet. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "control/protocol/message.h"

namespace farandole {

// A call that waits for ranks, for messages to users.
struct WaitingCall {
  std::string what;           // "'grad.w' (allreduce)"
  std::vector<Rank> here;     // have submitted it; without joined ranks
  std::vector<Rank> missing;  // have not submitted it
  int64_t since_ns = 0;
  bool moving = false;  // all have submitted it, but its bytes do not move; `missing` do not answer
  CallKey key = {};
};

// Calls in which the same ranks wait for the same others. Never empty; the oldest is first.
using CallGroup = std::vector<const WaitingCall*>;
std::vector<CallGroup> grouped(std::span<const WaitingCall> calls);
// "200 gradients of optimizer.0: rank 0 waiting for 10 s, rank 1 missing". Without the time if `now_ns` < 0.
std::string line_of(const CallGroup& group, int64_t now_ns);

// A rank whose main thread waits in `call`. `stack` is its report's text.
struct BlockedRank {
  Rank rank = 0;
  const WaitingCall* call = nullptr;
  std::string stack;
};
// One line: where ranks that wait for each other are, and the likely cause. Empty if `blocked` is.
std::string diagnosis_of(std::span<const BlockedRank> blocked);

}  // namespace farandole
