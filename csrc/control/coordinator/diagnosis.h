// SPDX-License-Identifier: Apache-2.0
// Composes texts about calls that wait for ranks, and about deadlocks between ranks. These are pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "control/protocol/message.h"

namespace farandole {

// A call that waits for ranks, as described in messages to users.
struct WaitingCall {
  std::string what;           // "'grad.w' (allreduce)"
  std::vector<Rank> here;     // ranks that have submitted the call, except those that have joined
  std::vector<Rank> missing;  // ranks that have not submitted the call
  int64_t since_ns = 0;
  bool moving = false;  // true for a bucket; `missing` then holds its stopped or silent ranks
  CallKey key = {};
};

// Calls that have the same `here` and `missing`. A group is never empty, and its oldest call comes first.
using CallGroup = std::vector<const WaitingCall*>;
std::vector<CallGroup> grouped(std::span<const WaitingCall> calls);
// Returns "200 gradients of optimizer.0: rank 0 waiting for 10 s, rank 1 missing", without the time if `now_ns` < 0.
std::string line_of(const CallGroup& group, int64_t now_ns);

// A rank whose main thread waits in `call`. `stack` is a StackReport::text.
struct BlockedRank {
  Rank rank = 0;
  const WaitingCall* call = nullptr;
  std::string stack;
};
// Returns a line that tells where the ranks of a deadlock wait, and the likely cause, or "" if `blocked` is empty.
std::string diagnosis_of(std::span<const BlockedRank> blocked);

}  // namespace farandole
