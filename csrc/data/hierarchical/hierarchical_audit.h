// SPDX-License-Identifier: Apache-2.0
// The audit of a block between hosts, see Audit. Only the inputs of a host lie where another member can read them, so
// it has three parts: another member of the host makes its sum again; who combines the hosts' sums does so twice; and
// each member compares its result with a copy of what its host has got.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/hierarchical/block_transfer.h"
#include "data/hierarchical/hierarchical_schedule.h"
#include "data/hierarchical/host_map.h"
#include "data/shm/sum_audit.h"

namespace farandole {

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

}  // namespace farandole
