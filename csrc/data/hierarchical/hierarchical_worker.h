// SPDX-License-Identifier: Apache-2.0
// The data work of HierarchicalBackend: what each phase does with a block's bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/backend/backend.h"
#include "data/hierarchical/block_transfer.h"
#include "data/hierarchical/hierarchical_schedule.h"
#include "data/hierarchical/host_map.h"
#include "data/shm/sum_audit.h"

namespace farandole {

// The audit of a block between hosts, see Audit. Only the inputs of a host lie where another member can read them, so
// it has three parts: another member of the host makes its sum again; who combines the hosts' sums does so twice; and
// each member compares its result with a copy of what its host has got.
class HierarchicalAudit {
 public:
  // `memory`: bytes_needed(), mapped by this host's members. `hosts` must outlive this.
  HierarchicalAudit(Audit::Setup setup, const HostMap& hosts, std::byte* memory,
                    size_t block_bytes);
  static size_t bytes_needed(int64_t every, int local_members, size_t block_bytes) {
    return every > 0 ? (static_cast<size_t>(local_members) + 2) * block_bytes : 0;
  }

  void start(std::span<const Part> parts, uint64_t first, const HierarchicalSchedule& plan);
  uint64_t before(uint64_t number) const { return audit_.before(number); }
  bool chosen(uint64_t number) const { return audit_.chosen(number); }

  // Of the chosen block only. Stage phase: copies this member's inputs.
  void keep_inputs(const HierarchicalBlock& block) const;
  // Reduce and publish phases: copies what this member has made or received.
  void keep_sum(const BlockTransfer& f, const BlockTransfer::Job& job) const;
  void keep_result(const BlockTransfer& f, const BlockTransfer::Job& job) const;
  // Combine phase: `again` is the chunk's result, made a second time.
  void check_combined(const BlockTransfer& f, const BlockTransfer::Job& job,
                      const std::byte* again) const;
  // Consume phase, last.
  void check(const HierarchicalBlock& block);

 private:
  std::byte* inputs(const Chunk& chunk, int member) const {
    return memory_ + static_cast<size_t>(hosts_.local_of(member)) * block_bytes_ + chunk.begin;
  }
  std::byte* sums(const Chunk& chunk) const {
    return memory_ + locals_.size() * block_bytes_ + chunk.begin;
  }
  std::byte* results(const Chunk& chunk) const { return sums(chunk) + block_bytes_; }
  bool audits_sum(const Chunk& chunk) const;
  void check_sum(const HierarchicalBlock& block, const Chunk& chunk);
  void check_result(const HierarchicalBlock& block, const Chunk& chunk) const;

  const HostMap& hosts_;
  const int member_;
  const int host_;
  const std::vector<int>& locals_;
  std::byte* const memory_;
  const size_t block_bytes_;
  Audit audit_;
  std::span<const Part> parts_;
  std::vector<const void*> scratch_;
  std::vector<std::byte> again_;
};

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
