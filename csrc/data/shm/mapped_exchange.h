// SPDX-License-Identifier: Apache-2.0
// Zero copy: of buffers in an arena that all members map, only the address travels. Peers read the input
// and write the result in place. Everything else, part by part and member by member, is staged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/shm/host_arenas.h"
#include "data/shm/staged_exchange.h"

namespace farandole {

class MappedExchange final : public Exchange {
 public:
  struct Setup {
    std::byte* tables;  // zeroed, bytes_needed(), aligned to 64
    int member;
    int slots;
    std::vector<int> locals;  // the members' local ranks
  };
  MappedExchange(const Setup& setup, HostArenas& arenas, StagedExchange staged);
  static size_t bytes_needed(int members, int slots);

  void open(uint64_t number, const Block& block) override;
  bool offer(uint64_t block, const Range& range, const Part& part) override;
  void expect(uint64_t block, const Range& range, const Part& part) override;
  const std::byte* reach(uint64_t block, const Range& range, int member) override;
  void deliver(uint64_t block, const Range& range, std::vector<std::byte*>& targets) override;
  std::byte* scratch(uint64_t block, const Range& range) override {
    return staged_.scratch(block, range);
  }
  void fetch(uint64_t block, const Range& range, const Part& part) override;
  void abandon(std::span<const Part> parts) override;

 private:
  // Of one part's buffers: 1 + their offsets in the member's arena; kNowhere: they are private.
  static constexpr uint64_t kNowhere = 0;
  struct Address {
    uint64_t input;
    uint64_t output;
  };
  // What a member tells about one block. Parts of a block are in one run, so their numbers differ modulo
  // the longest run.
  struct Table {
    alignas(64) uint64_t used;  // 0: everything is staged, and no address is written
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
    return arenas_.at(locals_[static_cast<size_t>(member)], address - 1);
  }
  uint64_t address_of(const std::byte* memory, size_t bytes);

  Table* const tables_;
  const int member_;
  const size_t slots_;
  const std::vector<int> locals_;
  HostArenas& arenas_;
  StagedExchange staged_;
};

}  // namespace farandole
