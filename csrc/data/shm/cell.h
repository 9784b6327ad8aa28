// SPDX-License-Identifier: Apache-2.0
// A cell: shared memory in which the members of a set on one host complete a small call, each in the calling thread. It
// only knows success. In any other case (a member is late, makes a different call, has joined, leaves or dies) the
// round dissolves, and all make the call through the coordinator.
//
// The algorithm is that of MPICH's release_gather and of DeepSpeed's shm.cpp: each member writes its input to its own
// place, and all read all places in member order.
// its own, and all read all places in member order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/clock.h"
#include "lib/ipc/cell_protocol.h"
#include "lib/ipc/segment.h"
#include "lib/os/futex.h"
#include "lib/os/spin.h"

namespace farandole {

class Cell {
 public:
  struct Setup {
    int member = 0;
    int members = 1;
    std::shared_ptr<Segment> segment;  // zeroed, mapped by all members
    size_t offset = 0;                 // start of the cell in `segment`, aligned to 64
    Spin spin;                         // for waiting callers
  };
  static constexpr size_t kAlignment = 4096;
  // Larger inputs go through the lane, where members divide the work.
  static size_t most_bytes(int members);
  static size_t bytes(int members);

  explicit Cell(Setup setup);

  // Identifies a call. Members that make the same one have equal values.
  struct Call {
    uint64_t definition = 0;  // number of the call's definition in the log
    uint64_t sequence = 0;    // unnamed calls
    int64_t rows = 0;         // the input's, if the definition leaves them open
    bool operator==(const Call&) const = default;
  };

  // ---- One thread at a time
  // Waits until all members have come with the same call and their inputs. False: make the call in a different way.
  bool meet(const Call& call, std::span<const std::byte> input) {
    const bool met = come(call, input) == cell_protocol::End::kCompleted;
    completed_ += met;
    return met;
  }
  // A member's input, from meet() until the next meet().
  const std::byte* input_of(int member) const { return place(member, parity_); }
  // Number of calls completed here; equal on all members.
  uint64_t completed() const { return completed_; }

  // ---- Under the mutex of RankCalls
  // Publishes how many calls of this member the coordinator has under way, and how many of the set have ended here.
  void tell(uint64_t ended, uint32_t under_way);
  // Ends a peer's wait here, which is vain because this member reports to the coordinator.
  void disturb();

 private:
  struct alignas(64) Word;
  // Each member writes its own cache line; all read it.
  struct alignas(64) Line {
    std::atomic<uint64_t> definition;
    std::atomic<uint64_t> sequence;
    std::atomic<int64_t> rows;
    std::atomic<uint64_t> elsewhere;  // calls that have ended << kCountBits | those under way
  };
  static constexpr int kCountBits = 24;

  cell_protocol::End come(const Call& call, std::span<const std::byte> input);
  Word& word() const;
  Line& line(int member) const;
  std::byte* place(int member, uint32_t parity) const;
  bool all_make(const Call& call) const;
  bool anybody_elsewhere() const;

  Setup setup_;
  std::byte* const memory_;
  const size_t most_bytes_;
  uint32_t parity_ = 0;  // the last round's
  uint64_t completed_ = 0;
};

}  // namespace farandole
