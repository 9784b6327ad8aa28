// SPDX-License-Identifier: Apache-2.0
// Carries out the phases of HierarchicalBackend on a block's bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/backend/backend.h"
#include "data/hierarchical/block_transfer.h"
#include "data/hierarchical/hierarchical_schedule.h"
#include "data/hierarchical/host_map.h"

namespace farandole {

class HierarchicalWorker {
 public:
  // `memory` consists of `slots` slots for each member of this host. Each slot has room for inputs and results. `hosts`
  // must outlive this object.
  HierarchicalWorker(const HostMap& hosts, int member, std::byte* memory, uint64_t slots,
                     size_t block_bytes);
  // Returns the size of `memory`, which is 0 for a member that is alone on its host.
  static size_t bytes_needed(int local_members, size_t block_bytes, int slots) {
    if (local_members == 1) return 0;
    return static_cast<size_t>(local_members * slots) * 2 * block_bytes;
  }

  void start(std::span<const Part> parts) { parts_ = parts; }
  void forget() { parts_ = {}; }
  // `block` is the block's number, which determines the block's slot.
  void stage(uint64_t block, const BlockTransfer& transfer) const;
  void reduce(uint64_t block, BlockTransfer& transfer);
  void combine(BlockTransfer& transfer);
  // Copies the results that this member has made or received to shared memory.
  void publish(uint64_t block, const BlockTransfer& transfer) const;
  void consume(uint64_t block, const BlockTransfer& transfer) const;

 private:
  void stage_chunk(uint64_t block, const BlockTransfer& f, const Chunk& chunk) const;
  void reduce_chunk(uint64_t block, BlockTransfer& f, const BlockTransfer::ChunkTask& task);
  void combine_chunk(BlockTransfer& f, const BlockTransfer::ChunkTask& task);
  void consume_chunk(const BlockTransfer& f, const Chunk& chunk, const std::byte* from) const;
  std::byte* staged(uint64_t block, int member, const Chunk& chunk) const;
  std::byte* published(uint64_t block, int member, const Chunk& chunk) const;
  std::byte* slot(uint64_t block, int member) const;

  const HostMap& hosts_;
  const int member_;
  const int host_;
  const std::vector<int>& locals_;
  std::byte* const memory_;
  const uint64_t slots_;
  const size_t block_bytes_;
  std::span<const Part> parts_;
  std::vector<const void*> inputs_;  // scratch
};

}  // namespace farandole
