// SPDX-License-Identifier: Apache-2.0
// How the bytes of a block come within reach of its peers: the one thing in which staging and memory
// mapped by all differ. The executor, HostPlane, knows only this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "data/fusion_plan.h"

namespace farandole {

// Called by one member, block by block. What is reached stays valid until that block is consumed by all.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // Stage phase: makes my `input` bytes of the range reachable.
  virtual void offer(uint64_t block, const Range& range, const std::byte* input) = 0;
  // Reduce phase: `member`'s input of the range.
  virtual const std::byte* reach(uint64_t block, const Range& range, int member) = 0;
  // Reduce phase: where a result must be written so that peers reach it; may be `output` itself.
  virtual std::byte* result(uint64_t block, const Range& range, std::byte* output) = 0;
  // Consume phase: copies what range.member offered or reduced to `output`.
  virtual void fetch(uint64_t block, const Range& range, std::byte* output) = 0;
  // Whether peers read my buffers: then a bucket is finished only when all have consumed it.
  virtual bool reads_private_memory() const = 0;
};

}  // namespace farandole
