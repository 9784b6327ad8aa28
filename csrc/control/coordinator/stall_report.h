// SPDX-License-Identifier: Apache-2.0
// What a person reads about calls that wait: who waits, for whom, since when, where those are, and the
// most likely cause. Text only; the coordinator decides when.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/types.h"

namespace farandole {

struct WaitingCall {
  std::string what;  // "'grad.w' (allreduce)"
  std::string name;
  std::string group;          // the rest of it is missing, if no rank is
  std::vector<Rank> here;     // have submitted it, joined ranks apart
  std::vector<Rank> missing;  // have not
  Rank first = -1;            // to submit it
  Rank last = -1;
  int64_t since_ns = 0;
  int64_t last_ns = 0;
  bool moving = false;  // all have submitted it: its bytes stand still, and `missing` do not answer
};

// What is known of one rank.
struct RankState {
  int64_t heard_ns = -1;  // its last call; -1: none yet
  bool silent = false;    // asked where it is, it has not answered
  bool stopped = false;   // by a signal or a debugger
  std::string where;      // its answer; empty: none
};
using StateOf = std::function<RankState(Rank)>;

// One line: "'x' (allreduce): ranks 0, 2 waiting for 10 s, rank 1 missing".
std::string line_of(const WaitingCall& call, int64_t now_ns);

// Why `rank` does not take part in `call`, as far as `all`, the calls that wait, tell.
std::string cause_of(const WaitingCall& call, Rank rank, const RankState& state,
                     const std::vector<WaitingCall>& all, int64_t now_ns);

// The missing ranks of `calls`, each with its cause and its stacks: indented lines, each after a newline.
std::string causes_of(const std::vector<WaitingCall>& calls, const std::vector<WaitingCall>& all,
                      const StateOf& state_of, int64_t now_ns);

// Everything about `calls`, which have waited too long.
std::string stall_report(const std::vector<WaitingCall>& calls, const std::vector<WaitingCall>& all,
                         const StateOf& state_of, int64_t now_ns);

// Whether two names are likely meant to be one: they differ in few letters.
bool near_names(const std::string& a, const std::string& b);

}  // namespace farandole
