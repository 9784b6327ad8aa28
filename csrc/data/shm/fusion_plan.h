// SPDX-License-Identifier: Apache-2.0
// Cuts a bucket into blocks, lazily and without touching a byte of it. Shapes, rows and members alone
// decide: every member cuts alike, whether or not it has buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/plane/part_run.h"
#include "data/plane/plane.h"

namespace farandole {

// Contiguous bytes of one part inside one block.
struct Range {
  uint32_t part;   // index in the bucket
  int32_t member;  // in whose slot they lie
  size_t slot;     // from the start of that slot; aligned to the element
  size_t input;    // from Part::input of the member that contributes them
  size_t output;   // from this member's Part::output
  size_t bytes;
};

// What one member does for one block, in three phases: stage, reduce, consume.
struct Block {
  std::vector<Range> sends;      // stage: my input, for my peers
  std::vector<Range> keeps;      // stage: my input into my own output
  std::vector<Range> reduces;    // reduce: everybody's input into a result
  std::vector<Range> receives;   // consume: what others sent or reduced, into my output
  std::vector<int32_t> sources;  // the members that `receives` come from
  bool combines = false;         // nobody reduces before all members have staged
  bool whole = false;            // every member reduces all of it
  int owners = 0;  // members [0, owners) reduce a stripe each, which the others receive

  // Whether peers look at what this member stages: else its slot may still be in use for an older block.
  bool shows() const { return !sends.empty() || owners > 0; }
  void clear();  // keeps the capacity: in the long run planning allocates nothing
};

class FusionPlan {
 public:
  // Stripes begin at cache lines, so an element is never cut.
  static constexpr size_t kAlignment = 64;

  // block_bytes: a multiple of kAlignment, at least kAlignment * members. An allreduce block is reduced
  // whole by every member, one hop between members instead of two, if the members' inputs of it come
  // to at most direct_bytes.
  FusionPlan(int member, int members, size_t block_bytes, size_t direct_bytes);

  // Throws kInternal when a part contradicts itself. `parts` must outlive the last next().
  void start(std::span<const Part> parts);

  // Fills the next block; false: there is none.
  bool next(Block& block);

 private:
  enum class Kind { kAllreduce, kReducescatter, kCopy, kBarrier };

  static Kind kind_of(const Signature& signature);
  bool fill(Block& block);
  bool fill_allreduce(Block& block);
  void add_direct(Block& block, const Range& segment) const;
  void add_stripes(Block& block, const Range& segment, size_t stripe_bytes) const;
  bool fill_reducescatter(Block& block);
  void add_share(Block& block, int owner, const PartLane& lane, size_t slot, size_t bytes) const;
  bool fill_copy(Block& block);
  void add_copy(Block& block, int sender, const PartLane& lane, size_t slot, size_t bytes) const;
  bool fill_barrier(Block& block);

  const int member_;
  const int members_;
  const size_t block_bytes_;
  const size_t direct_bytes_;
  PartRun run_;
  Kind kind_ = Kind::kBarrier;
  std::vector<PartLane> lanes_;  // copies have one for each sender, reductions a single one
  std::vector<Range> segments_;  // of an allreduce block, before it is cut into stripes
};

}  // namespace farandole
