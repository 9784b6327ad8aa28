// SPDX-License-Identifier: Apache-2.0
// The backend within one host. It moves buckets in blocks through shared memory. Its slots are small, so they stay in
// CPU caches. Used only by the driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/backend/backend.h"
#include "data/shm/host_arenas.h"
#include "data/shm/shm_schedule.h"
#include "kernels/kernels.h"
#include "lib/ipc/event_count.h"
#include "lib/ipc/segment.h"

namespace farandole {

// Settings of a ShmBackend. `members`, `block_bytes`, `slots`, `direct_bytes` and `locals` must be the same on all
// members.
struct ShmSetup {
  static constexpr size_t kBlockBytes = 512 * 1024;
  static constexpr int kSlots = 4;
  static constexpr size_t kDirectBytes = 128 * 1024;

  int member = 0;
  int members = 1;
  std::byte* memory = nullptr;  // zeroed, mapped by all members, aligned to 64
  size_t bytes = 0;             // at least sizes().bytes
  std::vector<Wakeup> wakeups;  // one per member, including this one
  size_t block_bytes = kBlockBytes;
  int slots = kSlots;
  size_t direct_bytes = kDirectBytes;  // see ShmSchedule
  HostArenas* arenas = nullptr;        // null if there is no zero copy; must outlive the backend
  std::vector<int> locals = {};        // local ranks of the members; used with `arenas`
  int fd = -1;  // file of `memory` if its pages are allocated on use, else -1
  PhaseWatch watch = {};
};

// Gives peers access to a block's bytes, either through copies in slots of shared memory or in place (zero copy). In
// place, members exchange only addresses, and all members must have mapped the buffer's arena. Each member chooses one
// of these ways for each part. Pointers stay valid until all members have consumed the block. "My" means this member's.
class Exchange {
 public:
  explicit Exchange(const ShmSetup& setup);
  static size_t mark_bytes(int members, int slots);
  static size_t table_bytes(int members, int slots);
  static size_t slot_bytes(int members, int slots, size_t block_bytes);

  // Stage phase: must be called before offer() and expect().
  void open(uint64_t number, const Block& block);
  // Stage phase: makes the range of my input accessible. Returns true if peers read the input buffer itself.
  bool offer(uint64_t block, const Range& range, const Part& part);
  // Stage phase: lets the peer that reduces this range write into my output, if peers have mapped the output.
  void expect(uint64_t block, const Range& range, const Part& part);
  // Reduce phase: returns the range of `member`'s input.
  const std::byte* reach(uint64_t block, const Range& range, int member) const;
  // Reduce phase: appends to `targets` all addresses where peers expect the range's result.
  void deliver(uint64_t block, const Range& range, const Part& part,
               std::vector<std::byte*>& targets);
  // Returns the range in my slot. If I reduce the range, the slot can hold the result: no peer reads my input there.
  std::byte* own_slot(uint64_t block, const Range& range);
  // Consume phase: copies to my output the range that range.member has offered or reduced, unless it is there already.
  void fetch(uint64_t block, const Range& range, const Part& part) const;
  // Drops the bucket in flight. Afterwards peers cannot change the parts' buffers.
  void abandon(std::span<const Part> parts);
  // Returns the number of bytes of my slots and tables that give_back() frees, or 0 if all memory is permanent.
  size_t held() const { return held_; }
  // Frees the bytes that held() counts. May be called only when no peer reads these bytes any more.
  void give_back();

 private:
  // Addresses of a part's buffers: 1 + the offset in the member's arena, or kNowhere if not in a mapped arena.
  static constexpr uint64_t kNowhere = 0;
  struct Address {
    uint64_t input;
    uint64_t output;
  };
  // Nonzero if a member has a table for a block. Otherwise the member copies all its bytes.
  struct Mark {
    alignas(64) uint64_t used;
  };
  // Indexed by part number modulo kMostParts. A block's parts belong to one run, so no two parts share an index.
  struct Table {
    Address addresses[PartRun::kMostParts];
  };

  size_t index(uint64_t block, int member) const {
    return static_cast<size_t>(member) * slots_ + block % slots_;
  }
  uint64_t& used(uint64_t block, int member) const { return marks_[index(block, member)].used; }
  Address& own(uint64_t block, const Range& range) const {
    return tables_[index(block, member_)].addresses[range.part % PartRun::kMostParts];
  }
  Address seen(uint64_t block, const Range& range, int member) const {
    if (used(block, member) == 0) return {kNowhere, kNowhere};
    return tables_[index(block, member)].addresses[range.part % PartRun::kMostParts];
  }
  const std::byte* slot(uint64_t block, const Range& range, int member) const {
    return slots_memory_ + index(block, member) * block_bytes_ + range.slot;
  }
  std::byte* memory_of(int member, uint64_t address) const {
    return arenas_->at(locals_[static_cast<size_t>(member)], address - 1);
  }
  uint64_t address_of(const std::byte* memory, size_t bytes);

  // The allocated bytes of one of my slots, or of my tables.
  struct Claim {
    std::byte* begin;
    size_t bytes = 0;
  };
  void claim(Claim& claim, size_t bytes);

  std::byte* const memory_;
  Mark* const marks_;
  Table* const tables_;
  std::byte* const slots_memory_;
  const int fd_;
  const int member_;
  const size_t slots_;
  const size_t block_bytes_;
  HostArenas* const arenas_;
  const std::vector<int> locals_;
  std::vector<Claim> claims_;  // one for each slot, then one for all tables
  size_t held_ = 0;
};

// Stages, reduces and consumes each block. Each phase has its own cursor, so a member that waits for peers can stage up
// to `slots` blocks ahead. Inputs are combined in member order, so results have the same bits in every run.
class ShmBackend final : public Backend {
 public:
  explicit ShmBackend(const ShmSetup& setup);
  // Returns the size of the memory that the backend needs. If ShmSetup::fd is set, the bytes after `at_once` are
  // allocated when they are first used.
  static SegmentSize sizes(int members, size_t block_bytes, int slots);

  void begin(std::span<const Part> parts) override;
  Progress step() override;
  bool ready() const override;
  void abort() override;
  size_t held() const override { return exchange_.held(); }
  void rest() override;

 private:
  Block& block(uint64_t index) { return blocks_[index % blocks_.size()]; }
  const Block& block(uint64_t index) const { return blocks_[index % blocks_.size()]; }

  bool can_stage() const;
  bool can_reduce() const;
  bool can_consume() const;
  bool finished() const;

  void plan_next();
  void stage();
  void reduce();
  void consume();
  void keep(const Range& range);
  void reduce_range(const Block& block, const Range& range);
  void combine(const Part& part, size_t bytes, size_t step);
  void ring_peers();

  const int member_;
  const int members_;
  const uint64_t slots_;
  std::vector<Wakeup> wakeups_;
  HostProgressTable progress_;
  Exchange exchange_;
  ShmSchedule plan_;
  const PhaseWatch watch_;
  std::span<const Part> parts_;
  std::vector<Block> blocks_;  // the blocks in flight, and the next one to stage
  struct {
    std::vector<const std::byte*> inputs;  // inputs of reduce_range()
    std::vector<std::byte*> targets;  // outputs of reduce_range(), which reduces into the first
    std::vector<const void*> chunk;   // inputs at the current chunk
  } scratch_;
  bool has_next_ = false;  // true if block(at_.staged) is scheduled
  bool aborted_ = false;
  struct {
    // The first three counters are the same as in this member's HostProgress.
    uint64_t staged = 0;
    uint64_t reduced = 0;
    uint64_t consumed = 0;
    uint64_t shown = 0;  // once all members have consumed this many blocks, no peer reads my inputs
  } at_;
};

}  // namespace farandole
