// SPDX-License-Identifier: Apache-2.0
// Cuts a bucket into blocks, one block at a time. The cuts depend only on shapes, rows and the number of members, so
// all members make the same cuts, even those without buffers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/backend/backend.h"

namespace farandole {

// One member's progress, in shared memory. The counters are numbers of blocks, counted over all buckets. Only that
// member writes its counters, and they never decrease. Zeroed memory is a valid initial state. Accesses are seq_cst,
// because Wakeup checks for sleepers afterwards.
struct HostProgress {
  using Counter = std::atomic<uint64_t>;
  alignas(64) Counter staged{0};
  alignas(64) Counter reduced{0};
  alignas(64) Counter consumed{0};
};
static_assert(HostProgress::Counter::is_always_lock_free && sizeof(HostProgress) == 192);

class HostProgressTable {
 public:
  using Column = HostProgress::Counter HostProgress::*;

  HostProgressTable(std::byte* memory, int members)
      : rows_(reinterpret_cast<HostProgress*>(memory)), members_(members) {}

  static size_t bytes_needed(int members) {
    return static_cast<size_t>(members) * sizeof(HostProgress);
  }

  uint64_t load(int member, Column column) const { return (rows_[member].*column).load(); }
  void store(int member, Column column, uint64_t blocks) { (rows_[member].*column).store(blocks); }

  bool all_reached(Column column, uint64_t blocks, int count) const {
    for (int member = 0; member < count; ++member) {
      if (load(member, column) < blocks) return false;
    }
    return true;
  }
  bool all_reached(Column column, uint64_t blocks) const {
    return all_reached(column, blocks, members_);
  }

 private:
  HostProgress* const rows_;
  const int members_;
};

// Contiguous bytes of one part in one block.
struct Range {
  uint32_t part;   // index in the bucket
  int32_t member;  // owner of the slot that has the bytes
  size_t slot;     // offset in that slot; aligned to the element
  size_t input;    // offset in Part::input of the contributing member
  size_t output;   // offset in this member's Part::output
  size_t bytes;
};

// One member's work for a block, in three phases: stage, reduce, consume.
struct Block {
  std::vector<Range> sends;      // stage: this member's input that peers read
  std::vector<Range> keeps;      // stage: this member's input, copied to its own output
  std::vector<Range> reduces;    // reduce: inputs of all members, combined into a result
  std::vector<Range> receives;   // consume: results and inputs of peers, copied to the output
  std::vector<int32_t> sources;  // members from which `receives` come
  bool combines = false;         // a member reduces only after all members have staged
  bool whole = false;            // every member reduces the whole block (one-shot)
  int owners = 0;  // members [0, owners) each reduce one stripe for all members (two-shot)

  // True if peers read this member's slot for this block. Otherwise the slot may still be in use for an older block.
  bool shows() const { return !sends.empty() || owners > 0; }
  void clear();  // keeps the capacities, so later blocks need no allocation
};

class ShmSchedule {
 public:
  // Stripes start at cache lines, so no element is cut.
  static constexpr size_t kAlignment = 64;

  // `block_bytes` is a multiple of kAlignment and at least kAlignment * members. If all members' inputs to an allreduce
  // block have at most `direct_bytes` in total, every member reduces the whole block: one hop instead of two.
  ShmSchedule(int member, int members, size_t block_bytes, size_t direct_bytes);

  // Throws Error(kInternal) if a part is inconsistent. `parts` must stay valid until the last next().
  void start(std::span<const Part> parts);

  // Returns false if there is no next block.
  bool next(Block& block);

 private:
  enum class Kind { kAllreduce, kReducescatter, kCopy };

  static Kind kind_of(const Signature& signature);
  bool fill(Block& block);
  bool fill_allreduce(Block& block);
  void add_direct(Block& block, const Range& segment) const;
  void add_stripes(Block& block, const Range& segment, size_t stripe_bytes) const;
  bool fill_reducescatter(Block& block);
  void add_share(Block& block, int owner, const PartLane& lane, size_t slot, size_t bytes) const;
  bool fill_copy(Block& block);
  void add_copy(Block& block, int sender, const PartLane& lane, size_t slot, size_t bytes) const;

  const int member_;
  const int members_;
  const size_t block_bytes_;
  const size_t direct_bytes_;
  PartRun run_;
  Kind kind_ = Kind::kAllreduce;
  std::vector<PartLane> lanes_;  // copies use one per sender; reductions use only the first
  std::vector<Range> segments_;  // an allreduce block's ranges before they are cut into stripes
};

}  // namespace farandole
