// SPDX-License-Identifier: Apache-2.0
// How the bytes of a block come within reach of its peers: the one thing in which staging and memory
// mapped by all differ. The executor, HostPlane, knows only this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/shm/fusion_plan.h"

namespace farandole {

// Called by one member, block by block. What is reached stays valid until that block is consumed by all.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // Stage phase, first: what follows belongs to this block.
  virtual void open(uint64_t number, const Block& block) = 0;
  // Stage phase: makes my input of the range reachable. True: peers read the input itself.
  virtual bool offer(uint64_t block, const Range& range, const Part& part) = 0;
  // Stage phase: a member will reduce this range for me; it may write into my output itself.
  virtual void expect(uint64_t block, const Range& range, const Part& part) = 0;
  // Reduce phase: `member`'s input of the range.
  virtual const std::byte* reach(uint64_t block, const Range& range, int member) = 0;
  // Reduce phase: where all must be written that peers expect; appended to `targets`.
  virtual void deliver(uint64_t block, const Range& range, std::vector<std::byte*>& targets) = 0;
  // Reduce phase: room for the range that nobody looks at any more.
  virtual std::byte* scratch(uint64_t block, const Range& range) = 0;
  // Consume phase: copies what range.member offered or reduced to my output, unless it lies there.
  virtual void fetch(uint64_t block, const Range& range, const Part& part) = 0;
  // Drops a bucket in flight: afterwards no peer changes what is in these buffers.
  virtual void abandon(std::span<const Part> parts) = 0;
};

}  // namespace farandole
