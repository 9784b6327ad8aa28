// SPDX-License-Identifier: Apache-2.0
// The data work of HierarchicalBackend: what each phase does with a block's bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/backend/backend.h"
#include "data/hierarchical/block_transfer.h"
#include "data/hierarchical/hierarchical_audit.h"
#include "data/hierarchical/host_map.h"

namespace farandole {

class HierarchicalWorker {
 public:
  // `memory`: for each member of this host `slots` slots, each with room for inputs and for results; then the audit's.
  HierarchicalWorker(const HostMap& hosts, std::byte* memory, uint64_t slots, size_t block_bytes,
                     Audit::Setup audit);
  static size_t bytes_needed(int local_members, size_t block_bytes, int slots,
                             int64_t audit_every) {
    return slot_bytes(local_members, block_bytes, static_cast<uint64_t>(slots)) +
           HierarchicalAudit::bytes_needed(audit_every, local_members, block_bytes);
  }

  // Sets the bucket that later calls refer to, and the number of its first block. `plan`: has started it.
  void start(std::span<const Part> parts, uint64_t first, const HierarchicalSchedule& plan);
  // The bucket is given up.
  void forget() { parts_ = {}; }
  // How many blocks all members of the host must have consumed before this one is staged.
  uint64_t before(uint64_t block) const { return audit_.before(block); }
  // `block`: its number, which determines its slot.
  void stage(uint64_t block, const BlockTransfer& transfer) const;
  void reduce(uint64_t block, BlockTransfer& transfer);
  void combine(uint64_t block, BlockTransfer& transfer);
  // Copies results that this member made or received to shared memory.
  void publish(uint64_t block, const BlockTransfer& transfer) const;
  // Throws DataFault if the block is audited and a result is wrong; so does combine().
  void consume(uint64_t block, const BlockTransfer& transfer);

 private:
  void stage_chunk(uint64_t block, const BlockTransfer& f, const Chunk& chunk) const;
  void reduce_chunk(uint64_t block, BlockTransfer& f, const BlockTransfer::Job& job);
  void combine_chunk(const BlockTransfer& f, const BlockTransfer::Job& job, std::byte* result,
                     kernels::Loops loops);
  void consume_chunk(uint64_t block, const BlockTransfer& f, const Chunk& chunk) const;
  std::byte* staged(uint64_t block, int member, const Chunk& chunk) const;
  std::byte* published(uint64_t block, int member, const Chunk& chunk) const;
  std::byte* slot(uint64_t block, int member) const;
  static size_t slot_bytes(int local_members, size_t block_bytes, uint64_t slots) {
    return static_cast<size_t>(local_members) * slots * 2 * block_bytes;
  }

  const HostMap& hosts_;
  const int member_;
  const int host_;
  const std::vector<int>& locals_;
  std::byte* const memory_;
  const uint64_t slots_;
  const size_t block_bytes_;
  std::span<const Part> parts_;
  HierarchicalAudit audit_;
  std::vector<const void*> inputs_;  // scratch
  std::vector<std::byte> again_;     // scratch
};

}  // namespace farandole
