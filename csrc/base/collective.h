// SPDX-License-Identifier: Apache-2.0
// The collectives, one row each. Whatever another room wants to know of an operation it asks its row, so a new
// collective whose bytes move by a pattern below is a value of Op and a row.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace farandole {

// Values are part of the C ABI (FARANDOLE_* in farandole.h) and of the wire: append only.
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
};

// How bytes get from inputs to outputs: what backends plan by.
enum class Pattern : uint8_t {
  kNone,            // no backend hears of it
  kMeet,            // no bytes: everybody comes
  kReduceToAll,     // one result, which all receive
  kReduceToOwners,  // one result, of which each member receives its rows
  kOneToAll,        // the root's input
  kEachToAll,       // every input, one behind the other
  kEachToEach,      // of every input some rows to each member; where there is a root, of its own
};

// What the numbers in Part::rows are.
enum class Rows : uint8_t {
  kNone,     // there are none: the result is as large as the input
  kKept,     // by member: rows of the result that it receives. They follow from the shape
  kBrought,  // by member: rows of its input. The log tells them
  kPairs,  // sender * members + receiver (if only a root sends: receiver): rows between the two. The log tells them
};

// What Signature::root is.
enum class Root : uint8_t { kNone, kRank, kSet };

struct CollectiveTraits {
  const char* name;
  Pattern pattern = Pattern::kNone;
  Rows rows = Rows::kNone;
  Root root = Root::kNone;
  bool rides_along = false;  // few bytes travel with the report, and the result in the log
  bool predicted = false;    // a step repeats it alike, so one report may stand for several calls
  bool windowed = false;     // on GPUs it may use a place in memory that NCCL has registered
  bool changes_sets =
      false;  // asks for a process set, or for the end of one: the whole world's business

  // A backend may have to move bytes; all else is done when the log says so.
  constexpr bool moves_bytes() const {
    return pattern != Pattern::kNone && pattern != Pattern::kMeet;
  }
  constexpr bool reduces() const {
    return pattern == Pattern::kReduceToAll || pattern == Pattern::kReduceToOwners;
  }
  // Only the root brings an input.
  constexpr bool rooted() const { return root == Root::kRank; }
  // Ranks may differ in the first dimension, and the result's is known when all have reported.
  constexpr bool ragged() const { return rows == Rows::kBrought || rows == Rows::kPairs; }
  // A member says how many rows go to each other.
  constexpr bool splits() const { return rows == Rows::kPairs; }
  // Rows are dealt out, so a scalar has too few dimensions.
  constexpr bool needs_rows() const { return rows != Rows::kNone; }
  // How many numbers of rows the log tells, and where those of one member begin.
  constexpr size_t told_rows(size_t members) const {
    if (rows == Rows::kPairs) return rooted() ? members : members * members;
    return rows == Rows::kBrought ? members : 0;
  }
  constexpr size_t first_told(size_t member, size_t members) const {
    if (rows == Rows::kPairs) return rooted() ? 0 : member * members;
    return member;
  }
  // Input and output may be one buffer.
  constexpr bool in_place() const { return rows != Rows::kPairs; }
  // That calls of it make up. Where nobody brings bytes, one may stand for a group without members: peers may
  // bring some.
  constexpr int32_t smallest_group() const { return pattern == Pattern::kMeet ? 0 : 1; }
};

inline constexpr std::array<CollectiveTraits, 10> kCollectives = {{
    {.name = "allreduce",
     .pattern = Pattern::kReduceToAll,
     .rides_along = true,
     .predicted = true,
     .windowed = true},
    {.name = "broadcast", .pattern = Pattern::kOneToAll, .root = Root::kRank, .rides_along = true},
    {.name = "allgather",
     .pattern = Pattern::kEachToAll,
     .rows = Rows::kBrought,
     .rides_along = true},
    {.name = "reducescatter", .pattern = Pattern::kReduceToOwners, .rows = Rows::kKept},
    {.name = "alltoall", .pattern = Pattern::kEachToEach, .rows = Rows::kPairs},
    {.name = "barrier", .pattern = Pattern::kMeet},
    {.name = "join"},
    {.name = "add_process_set", .changes_sets = true},
    {.name = "remove_process_set", .root = Root::kSet, .changes_sets = true},
    {.name = "scatter", .pattern = Pattern::kEachToEach, .rows = Rows::kPairs, .root = Root::kRank},
}};
inline constexpr int32_t kOpCount = kCollectives.size();
static_assert(static_cast<int32_t>(Op::kScatter) == kOpCount - 1,
              "one row for each Op, in its order");

inline constexpr CollectiveTraits kNoCollective{.name = "unknown"};

constexpr const CollectiveTraits& traits_of(Op op) {
  const auto index = static_cast<size_t>(op);
  return index < kCollectives.size() ? kCollectives[index] : kNoCollective;
}
constexpr const char* name_of(Op op) { return traits_of(op).name; }

}  // namespace farandole
