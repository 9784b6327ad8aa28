// SPDX-License-Identifier: Apache-2.0
// The collectives, with a row of traits for each. Other code reads traits instead of comparing values of Op, so a
// collective that uses an existing Pattern needs only a value of Op and a row.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/abi.h"

namespace farandole {

// These values are part of the C ABI (farandole.h) and of messages between ranks, so only append to them.
enum class Op : int32_t {
  kAllreduce = 0,
  kBroadcast = 1,
  kAllgather = 2,
  kReducescatter = 3,
  kAlltoall = 4,
  kBarrier = 5,
  kJoin = 6,
  kAddSet = 7,
  kRemoveSet = 8,
  kScatter = 9,
  kSend = 10,
  kReceive = 11,
  kReduce = 12,
};

// Describes how data move from inputs to outputs. The pattern determines a backend's algorithm.
enum class Pattern : uint8_t {
  kNone,            // no bytes move
  kMeet,            // no bytes move; ends when all members have made the call
  kReduceToAll,     // one result for all members, or for the root if there is one
  kReduceToOwners,  // one result; each member receives its own rows
  kOneToAll,        // all members receive the root's input
  kEachToAll,       // all members receive all inputs, concatenated
  kEachToEach,      // each member receives some rows of every input, or of the root's
};

// Meaning of the numbers in Part::rows (data/backend/backend.h).
enum class Rows : uint8_t {
  kNone,     // no numbers, because the result is as large as the input
  kKept,     // rows of the result that each member receives; computed from the shape
  kBrought,  // rows of the input of each member; also in the log entry
  // The number of rows that each member sends to each member, at index sender * members + receiver. If there is
  // a root, only the root sends, and the index is the receiver. The log entry contains these numbers, too.
  kPairs,
};

// For kKept, returns the number of rows that a member receives. The first members get the remainder, as in Horovod.
constexpr int64_t kept_rows(int64_t rows, int member, int members) {
  return rows / members + (member < rows % members ? 1 : 0);
}

// Meaning of Signature::root: the only member with an input, the only member with a result, or a process set.
enum class Root : uint8_t { kNone, kSource, kTarget, kSet };

// Role of a call in a message between two ranks. PostTable matches a send with a receive; both ranks then run the send.
enum class End : uint8_t { kNone, kSender, kReceiver };

struct CollectiveTraits {
  const char* name;
  Pattern pattern = Pattern::kNone;
  Rows rows = Rows::kNone;
  Root root = Root::kNone;
  bool rides_along =
      false;  // small inputs travel in reports, and the result in the log, without a backend
  bool changes_sets = false;  // adds or removes a process set; all ranks of the world take part
  End end = End::kNone;

  // True if a backend may have to move bytes. Any other call is complete when the rank reads its log entry.
  constexpr bool moves_bytes() const {
    return pattern != Pattern::kNone && pattern != Pattern::kMeet;
  }
  constexpr bool reduces() const {
    return pattern == Pattern::kReduceToAll || pattern == Pattern::kReduceToOwners;
  }
  // True if the call waits for a single other rank instead of all members.
  constexpr bool paired() const { return end != End::kNone; }
  constexpr bool from_root() const { return root == Root::kSource; }
  constexpr bool to_root() const { return root == Root::kTarget; }
  constexpr bool rooted() const { return from_root() || to_root(); }
  // True if all members have the same role. They should then call from the same line of the program.
  constexpr bool made_by_all_alike() const { return moves_bytes() && !rooted() && !paired(); }
  // True if the first dimension may differ between members. The first dimension of the result is known once all members
  // have reported.
  constexpr bool ragged() const { return rows == Rows::kBrought || rows == Rows::kPairs; }
  // True if each sender specifies the number of rows for each member.
  constexpr bool splits() const { return rows == Rows::kPairs; }
  // True if members exchange rows, so that the input needs at least one dimension.
  constexpr bool needs_rows() const { return rows != Rows::kNone; }
  // Returns the number of row counts in the log entry. The function below returns the index of a member's first count.
  constexpr size_t logged_rows(size_t members) const {
    if (rows == Rows::kPairs) return rooted() ? members : members * members;
    return rows == Rows::kBrought ? members : 0;
  }
  constexpr size_t first_logged(size_t member, size_t members) const {
    if (rows == Rows::kPairs) return rooted() ? 0 : member * members;
    return member;
  }
  constexpr bool in_place() const { return rows != Rows::kPairs; }
};

// clang-format off
inline constexpr std::array<CollectiveTraits, 13> kCollectives = {{
    {.name = "allreduce", .pattern = Pattern::kReduceToAll, .rides_along = true},
    {.name = "broadcast", .pattern = Pattern::kOneToAll, .root = Root::kSource, .rides_along = true},
    {.name = "allgather", .pattern = Pattern::kEachToAll, .rows = Rows::kBrought, .rides_along = true},
    {.name = "reducescatter", .pattern = Pattern::kReduceToOwners, .rows = Rows::kKept},
    {.name = "alltoall", .pattern = Pattern::kEachToEach, .rows = Rows::kPairs},
    {.name = "barrier", .pattern = Pattern::kMeet},
    {.name = "join"},
    {.name = "add_process_set", .changes_sets = true},
    {.name = "remove_process_set", .root = Root::kSet, .changes_sets = true},
    {.name = "scatter", .pattern = Pattern::kEachToEach, .rows = Rows::kPairs, .root = Root::kSource},
    {.name = "send", .pattern = Pattern::kOneToAll, .root = Root::kSource,
     .rides_along = true, .end = End::kSender},
    {.name = "receive", .pattern = Pattern::kOneToAll, .root = Root::kSource, .end = End::kReceiver},
    {.name = "reduce", .pattern = Pattern::kReduceToAll, .root = Root::kTarget, .rides_along = true},
}};
// clang-format on
inline constexpr int32_t kOpCount = kCollectives.size();
static_assert(FARANDOLE_REDUCE == kOpCount - 1 &&
                  static_cast<int32_t>(Op::kReduce) == FARANDOLE_REDUCE,
              "one row for each value of the header's enum, in its order");

inline constexpr CollectiveTraits kNoCollective{.name = "unknown"};

constexpr const CollectiveTraits& traits_of(Op op) {
  const auto index = static_cast<size_t>(op);
  return index < kCollectives.size() ? kCollectives[index] : kNoCollective;
}
constexpr const char* name_of(Op op) { return traits_of(op).name; }

}  // namespace farandole
