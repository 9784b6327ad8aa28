// SPDX-License-Identifier: Apache-2.0
// FARANDOLE_AUDIT=n: of every n-th bucket that reduces anything, one block is reduced again, from copies of the inputs
// that are kept apart, one number at a time, and compared bit by bit. Here: what all backends share, and the audit
// inside a host. The driver only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "data/backend/backend.h"
#include "data/shm/shm_schedule.h"

namespace farandole {

class Audit {
 public:
  // Equal on all members, but for `member` and `audited`.
  struct Setup {
    int64_t every = 0;  // of the buckets; 0: none
    int member = 0;
    std::vector<std::string> names = {};  // of all members, for errors
    std::function<void()> audited = {};   // called after each block
  };
  // Numbers that have been computed twice.
  struct Sum {
    size_t part;   // of the bucket
    size_t first;  // element
    DType dtype;   // of these numbers
    size_t bytes;
    int maker;  // the member that made it
    const char* what;
  };
  static constexpr uint64_t kNone = UINT64_MAX;

  explicit Audit(Setup setup) : setup_(std::move(setup)) {}
  bool ever() const { return setup_.every > 0; }
  // A bucket begins, whose first block has this number. `started`: its schedule, which is. `reduces`: whether a block
  // does.
  template <class Schedule, class Block, class Reduces>
  void start(std::span<const Part> parts, uint64_t first, const Schedule& started, Block block,
             Reduces&& reduces) {
    block_ = kNone;
    if (!takes(parts)) return;
    Schedule plan = started;
    std::vector<uint64_t> blocks;
    for (; plan.next(block); ++first) {
      if (reduces(block)) blocks.push_back(first);
    }
    if (!blocks.empty()) block_ = blocks[draw() % blocks.size()];
  }
  // Whether it is the block that is audited.
  bool chosen(uint64_t block) const { return block == block_; }
  // How many blocks all members must have consumed before this one is staged, so that nobody needs the copies of the
  // last audit any more.
  uint64_t before(uint64_t block) const { return chosen(block) ? copies_used_ : 0; }
  // Throws DataFault if `found` is not what it is `again`.
  void compare(const Sum& sum, const std::byte* found, const std::byte* again) const;
  // The chosen block has been audited.
  void finish();

 private:
  bool takes(std::span<const Part> parts);
  uint64_t draw() const;  // a number that depends on the bucket's

  const Setup setup_;
  uint64_t buckets_ = 0;  // that reduce
  uint64_t block_ = kNone;
  uint64_t copies_used_ = 0;
};

// Of a block in shared memory. Each member that gets a result audits all of it.
class ShmAudit {
 public:
  // `memory`: bytes_needed(), mapped by all members.
  ShmAudit(Audit::Setup setup, int members, std::byte* memory, size_t block_bytes)
      : member_(setup.member),
        members_(members),
        memory_(memory),
        block_bytes_(block_bytes),
        audit_(std::move(setup)) {}
  static size_t bytes_needed(int64_t every, int members, size_t block_bytes) {
    return every > 0 && members > 1 ? static_cast<size_t>(members) * block_bytes : 0;
  }

  void start(std::span<const Part> parts, uint64_t first, const ShmSchedule& plan);
  uint64_t before(uint64_t block) const { return audit_.before(block); }
  // Stage phase: copies this member's inputs.
  void keep(uint64_t number, const Block& block) const;
  // Consume phase, last: throws DataFault.
  void check(uint64_t number, const Block& block);

 private:
  std::byte* copy_of(const Range& range, int member) const {
    return memory_ + static_cast<size_t>(member) * block_bytes_ + range.slot;
  }
  void check(const Range& range, int maker);

  const int member_;
  const int members_;
  std::byte* const memory_;
  const size_t block_bytes_;
  Audit audit_;
  std::span<const Part> parts_;
  std::vector<const void*> inputs_;  // scratch
  std::vector<std::byte> again_;     // scratch
};

}  // namespace farandole
