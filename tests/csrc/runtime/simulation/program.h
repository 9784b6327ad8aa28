// SPDX-License-Identifier: Apache-2.0
// The program of the ranks of one simulated world, and how each of their calls may end.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "control/coordinator/coordinator.h"

namespace farandole::simulation {

// How a call ends on a rank. Bits: an event at an unknown moment allows several.
enum Outcome : uint8_t {
  kDone = 1,
  kAbsent = 2,
  kMismatched = 4,
  kInvalid = 8,
  kRefused = 16,  // ErrorCode::kWrongType
  kPeerGone = 32,
  kStalled = 64,
  kSkipped = 128,  // its process set was never opened
};

enum class Role : uint8_t {
  kMissing,  // does not report: it has joined, comes too late, or never
  kInput,
  kEmpty,  // takes part without a buffer
  kRefuse,
};

struct PlannedSet {
  std::vector<Rank> ranks;
  int added_by = -1;  // call; the world (index 0) is just there
  int member_of(Rank rank) const;
};

struct PlannedCall {
  int set = 0;                 // index into Program::sets
  int removes = -1;            // the same, for a call that removes a set
  Request request;             // as most members mean it; the set's id is filled in at run time
  std::map<int, Request> odd;  // members that mean something else
  std::vector<Role> roles;     // by member; of a message: missing are all but its ends
  bool joins = false;          // its missing members have joined
  int ended_by = -1;           // the call that removes its set while it is under way
  uint8_t allowed = 0;         // Outcomes
  uint8_t calm = 0;            // the same, until the world's trouble begins
  // ---- of a message, whose request is a send
  int sender = -1;  // members; -1: it is no message
  int receiver = -1;
  bool from_any = false;  // the receiver does not name the sender
  int64_t tag = 0;
  bool message() const { return sender >= 0; }
  const Request& request_of(int member) const;
};

struct Action {
  enum class Kind : uint8_t {
    kSubmit,     // value: call
    kDuplicate,  // value: call; tries to submit it again: refused locally while it is in flight
    kCall,       // value: call; submits it and waits for it
    kWait,       // value: call
    kWaitAll,    // value: 1: also for what it refused itself
    kJoin,       // value: planned set
    kSync,       // value: number; until all ranks have come here, by other means than ours
    kPause,      // value: ns
    kLeave,
    kFail,  // leaves with an error
    kDie,
  };
  Kind kind;
  int64_t value = 0;
  bool more = false;  // of a kSubmit: the next one is of the same batch
};

// A world's fault that its program does not plan.
enum class Trouble : uint8_t {
  kLittle,   // a rank stops for a moment, a link is slow: no call ends otherwise
  kDeaths,   // any rank may die at any moment
  kStop,     // a rank stops, for longer than others wait for it or for ever
  kCut,      // a link between two hosts ends
  kHunger,   // memory of a set cannot be had now and then
  kSilence,  // a link loses all that one host sends to the other, and ends once that is noticed
};

struct Program {
  Coordinator::Settings settings;
  std::vector<PlannedSet> sets;
  std::vector<PlannedCall> calls;
  std::vector<std::vector<Action>> actions;  // by rank
  Trouble trouble = Trouble::kLittle;
  // Ranks may come to a call when others have given it up.
  bool late() const { return trouble == Trouble::kStop || trouble == Trouble::kSilence; }
  // The results of reductions, by call and tensor; each is computed once.
  mutable std::map<std::pair<int, size_t>, std::vector<int32_t>> sums;
};

// The same program for the same seed, everywhere.
Program plan(uint64_t seed, int size, Trouble trouble);

// ---- The oracle: knows results without a coordinator.

// Fills PlannedCall::allowed.
void foresee(Program& program);
// A member's input to a tensor of a call, and how many rows of it are for whom; nullopt: it has no buffer.
std::optional<std::vector<int32_t>> input_of(const Program& program, int call, int member,
                                             size_t part);
std::vector<int64_t> splits_of(const Program& program, int call, int member);
// The shape of that input, and of a buffer for what the member is to get; the same for all, but for the rows.
Dimensions shape_of(const Program& program, int call, int member, size_t part);
// The output that the member must find once the call is done; nullopt: it gets nothing.
std::optional<std::vector<int32_t>> result_of(const Program& program, int call, int member,
                                              size_t part);

}  // namespace farandole::simulation
