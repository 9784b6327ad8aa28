// SPDX-License-Identifier: Apache-2.0
// A cell: shared memory in which the members of a process set, all on one host, complete a small call among themselves,
// each in the thread that makes it. It knows success only. Whatever else may happen (a member that is late, makes a
// different call, has joined, leaves or dies) dissolves the round, and all make the call through the coordinator.
//
// The algorithm is that of MPICH's release_gather and of DeepSpeed's shm.cpp: each member writes its input to a place of
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
    size_t offset = 0;                 // of the cell in it, aligned to 64
    Spin spin;                         // of the caller that waits
  };
  static constexpr size_t kAlignment = 4096;
  // Inputs of more bytes go through the lane, where members divide the work.
  static size_t most_bytes(int members);
  static size_t bytes(int members);

  explicit Cell(Setup setup);

  // Identifies a call: members that make the same one have equal values.
  struct Call {
    uint64_t definition = 0;  // number of the call's definition in the log
    uint64_t sequence = 0;    // of an unnamed call
    int64_t rows = 0;         // of the input, if the definition leaves them open
    bool operator==(const Call&) const = default;
  };

  // ---- One thread at a time
  // Waits until all members have come with the same call and their inputs. False: make the call in another way.
  bool meet(const Call& call, std::span<const std::byte> input) {
    const bool met = come(call, input) == cell_protocol::End::kCompleted;
    completed_ += met;
    return met;
  }
  // After meet(): a member's input, until the next meet().
  const std::byte* input_of(int member) const { return place(member, parity_); }
  // Counts the calls that have been completed here; the same on all members.
  uint64_t completed() const { return completed_; }

  // ---- Under the mutex of RankCalls
  // Tells the peers how many calls of this member are under way through the coordinator, after so many of the set have
  // ended on it.
  void tell(uint64_t ended, uint32_t under_way);
  // A peer that waits here waits in vain, because this member reports to the coordinator.
  void disturb();

 private:
  struct alignas(64) Word;
  // Each member writes its own line; all read it.
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
  uint32_t parity_ = 0;  // of the last round
  uint64_t completed_ = 0;
};

}  // namespace farandole
