// SPDX-License-Identifier: Apache-2.0
// The text of stall warnings: who waits for whom since when, the missing ranks' stacks, and the most likely
// cause. Text only; StallMonitor decides when.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/collective.h"
#include "base/types.h"

namespace farandole {

struct WaitingCall {
  std::string what;  // "'grad.w' (allreduce)"
  std::string name;
  std::string group;          // if no rank is missing: calls of this group are
  std::vector<Rank> here;     // have submitted it; joined ranks excluded
  std::vector<Rank> missing;  // have not
  Rank first = -1;            // rank that submitted it first
  Rank last = -1;
  int64_t since_ns = 0;
  int64_t last_ns = 0;
  bool made_before = false;  // a call of this name has been complete once
  bool moving = false;       // all have submitted it; its bytes don't move, `missing` don't answer
  // ---- of a message's end that waits for the other one
  End end = End::kNone;
  int64_t tag = 0;
};

// What is known of one rank.
struct RankState {
  int64_t heard_ns = -1;  // its last call; -1: none yet
  bool silent = false;    // asked for its stack, it has not answered
  bool stopped = false;   // by a signal or a debugger
  std::string where;      // its answer; empty: none
};
using StateOf = std::function<RankState(Rank)>;

// One line, such as "'x' (allreduce): ranks 0, 2 waiting for 10 s, rank 1 missing".
std::string line_of(const WaitingCall& call, int64_t now_ns);

// Why `rank` does not take part in `call`, judged by `all` waiting calls.
std::string cause_of(const WaitingCall& call, Rank rank, const RankState& state,
                     const std::vector<WaitingCall>& all, int64_t now_ns);

// Cause and stack of each missing rank of `calls`: indented lines, each after a newline.
std::string causes_of(const std::vector<WaitingCall>& calls, const std::vector<WaitingCall>& all,
                      const StateOf& state_of, int64_t now_ns);

// The whole warning about `calls`, which have waited too long.
std::string stall_report(const std::vector<WaitingCall>& calls, const std::vector<WaitingCall>& all,
                         const StateOf& state_of, int64_t now_ns);

// Whether two names are probably meant to be the same: they differ in few letters.
bool near_names(const std::string& a, const std::string& b);

}  // namespace farandole
