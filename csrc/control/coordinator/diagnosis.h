// SPDX-License-Identifier: Apache-2.0
// Makes texts about which calls wait for which ranks, and about deadlocks between ranks. Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "control/protocol/message.h"

namespace farandole {

// A call that waits for ranks, as messages to users describe it.
struct WaitingCall {
  std::string what;           // "'grad.w' (allreduce)"
  std::vector<Rank> here;     // ranks that have submitted it, except joined ranks
  std::vector<Rank> missing;  // ranks that have not submitted it
  int64_t since_ns = 0;
  bool moving = false;  // a bucket that makes no progress; `missing`: stopped or silent ranks
  CallKey key = {};
};

// Calls with the same `here` and `missing`. Never empty; the oldest is first.
using CallGroup = std::vector<const WaitingCall*>;
std::vector<CallGroup> grouped(std::span<const WaitingCall> calls);
// "200 gradients of optimizer.0: rank 0 waiting for 10 s, rank 1 missing"; without the time if `now_ns` < 0.
std::string line_of(const CallGroup& group, int64_t now_ns);

// A rank whose main thread waits in `call`. `stack`: StackReport::text.
struct BlockedRank {
  Rank rank = 0;
  const WaitingCall* call = nullptr;
  std::string stack;
};
// One line: where the ranks of a deadlock wait, and the likely cause. Empty if `blocked` is empty.
std::string diagnosis_of(std::span<const BlockedRank> blocked);

}  // namespace farandole
