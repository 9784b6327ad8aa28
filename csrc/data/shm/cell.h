// SPDX-License-Identifier: Apache-2.0
// A cell is shared memory in which the members of a process set on one host complete a small call. Each member does its
// work in the thread that makes the call. A cell reports no errors. If a member is late, makes a different call, has
// called join(), leaves or dies, the round is dissolved, and all members make the call through the coordinator.
//
// MPICH's release_gather and DeepSpeed's shm.cpp use the same algorithm: each member writes its input to its own place,
// and every member reads all places in member order.
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
  // Returns the largest input's size in bytes. Larger inputs go through the set's lane, where members divide the work.
  static size_t most_bytes(int members);
  static size_t bytes(int members);

  explicit Cell(Setup setup);

  // Identifies a call: members that make the same call have equal values.
  struct Call {
    uint64_t definition = 0;  // number of the call's definition in the log
    uint64_t sequence = 0;    // number of an unnamed call
    int64_t rows = 0;         // rows of the input, if they are not part of the definition
    bool operator==(const Call&) const = default;
  };

  // ---- One thread at a time
  // Writes `input` and waits until all members have made the same call. Returns false if the call must be made through
  // the coordinator.
  bool meet(const Call& call, std::span<const std::byte> input) {
    const bool met = come(call, input) == cell_protocol::End::kCompleted;
    completed_ += met;
    return met;
  }
  // Returns the input of `member` after meet() has returned true. The input is valid until this member's next meet().
  const std::byte* input_of(int member) const { return place(member, parity_); }
  // Returns the number of calls completed in this cell, which is the same on all members.
  uint64_t completed() const { return completed_; }

  // ---- The caller holds the mutex of RankCalls
  // Publishes how many of the set's calls have ended on this member, and how many it has under way outside the cell.
  void tell(uint64_t ended, uint32_t under_way);
  // Dissolves the round in which peers wait for this member. Call it after this member has reported.
  void disturb();

 private:
  struct alignas(64) Word;
  // Each member writes its own cache line. All members read it.
  struct alignas(64) Line {
    std::atomic<uint64_t> definition;
    std::atomic<uint64_t> sequence;
    std::atomic<int64_t> rows;
    std::atomic<uint64_t> elsewhere;  // tell() stores ended << kCountBits | under_way
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
  uint32_t parity_ = 0;  // parity of this member's last round
  uint64_t completed_ = 0;
};

}  // namespace farandole
