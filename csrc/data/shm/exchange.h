// SPDX-License-Identifier: Apache-2.0
// How peers access a block's bytes: copied through slots in memory that all members map, or zero copy. If all
// members map the arena that a buffer is in, only its address is exchanged, and peers read inputs and write
// results in place. Decided per part and member. Used by ShmBackend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/shm/host_arenas.h"
#include "data/shm/shm_schedule.h"
#include "kernels/kernels.h"

namespace farandole {

// Called by one member, block by block. Pointers stay valid until all members have consumed the block.
class Exchange {
 public:
  struct Setup {
    std::byte* tables;  // zeroed, table_bytes(), aligned to 64
    std::byte* memory;  // slot_bytes(), aligned to 64
    int member;
    int slots;
    size_t block_bytes;
    HostArenas* arenas;       // nullptr, on all members: everything is copied
    std::vector<int> locals;  // with arenas: local ranks of the members
  };
  explicit Exchange(const Setup& setup);
  static size_t table_bytes(int members, int slots);
  static size_t slot_bytes(int members, int slots, size_t block_bytes);

  // Stage phase, first: the following calls are for this block.
  void open(uint64_t number, const Block& block);
  // Stage phase: makes my input of the range accessible. True: peers read the input buffer itself.
  bool offer(uint64_t block, const Range& range, const Part& part);
  // Stage phase: a peer will reduce this range for me, and may write into my output.
  void expect(uint64_t block, const Range& range, const Part& part);
  // Reduce phase: `member`'s input of the range.
  const std::byte* reach(uint64_t block, const Range& range, int member) const;
  // Reduce phase: appends to `targets` all places where peers expect the result.
  void deliver(uint64_t block, const Range& range, const Part& part,
               std::vector<std::byte*>& targets) const;
  // Memory for the range in a member's slot. In the reduce phase no peer reads my own any more.
  std::byte* slot(uint64_t block, const Range& range, int member) const {
    const size_t index = static_cast<size_t>(member) * slots_ + block % slots_;
    return memory_ + index * block_bytes_ + range.slot;
  }
  // Consume phase: copies what range.member offered or reduced into my output, unless it is there already.
  void fetch(uint64_t block, const Range& range, const Part& part) const;
  // Drops the bucket in flight: afterwards no peer changes these buffers.
  void abandon(std::span<const Part> parts);

 private:
  // Addresses of one part's buffers: 1 + offset in the member's arena; kNowhere: not shared.
  static constexpr uint64_t kNowhere = 0;
  struct Address {
    uint64_t input;
    uint64_t output;
  };
  // What a member tells its peers about one block. A block's parts are in one run, so their numbers modulo
  // the longest run differ.
  struct Table {
    alignas(64) uint64_t used;  // 0: everything is copied, and `addresses` is not written
    Address addresses[PartRun::kMostParts];
  };

  Table& table(uint64_t block, int member) const {
    return tables_[static_cast<size_t>(member) * slots_ + block % slots_];
  }
  Address& own(uint64_t block, const Range& range) const {
    return table(block, member_).addresses[range.part % PartRun::kMostParts];
  }
  Address seen(uint64_t block, const Range& range, int member) const {
    const Table& theirs = table(block, member);
    if (theirs.used == 0) return {kNowhere, kNowhere};
    return theirs.addresses[range.part % PartRun::kMostParts];
  }
  std::byte* memory_of(int member, uint64_t address) const {
    return arenas_->at(locals_[static_cast<size_t>(member)], address - 1);
  }
  uint64_t address_of(const std::byte* memory, size_t bytes);

  Table* const tables_;
  std::byte* const memory_;
  const int member_;
  const size_t slots_;
  const size_t block_bytes_;
  HostArenas* const arenas_;
  const std::vector<int> locals_;
};

}  // namespace farandole
