// SPDX-License-Identifier: Apache-2.0
// Large parts are read from the peers' private memory, in one copy; small ones are staged. Pull only:
// nobody writes another's memory, and what was read from a member that has aborted is discarded.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/types.h"
#include "data/exchange.h"
#include "data/host_progress.h"
#include "data/staged_exchange.h"

namespace farandole {

class PulledExchange final : public Exchange {
 public:
  struct Peer {
    Rank rank = 0;  // for messages
    pid_t pid = 0;
  };

  // table: table_bytes(), mapped by all members. peers: all members. Parts of which a member sends
  // at least least_bytes are pulled.
  PulledExchange(StagedExchange& staged, const HostProgressTable& progress, std::byte* table,
                 int member, std::vector<Peer> peers, size_t block_bytes, size_t least_bytes);
  static size_t table_bytes(int members);

  void begin(std::span<const Part> parts) override;
  void offer(uint64_t block, const Range& range, const std::byte* input) override;
  const std::byte* reach(uint64_t block, const Range& range, int member) override;
  std::byte* result(uint64_t block, const Range& range, std::byte* output) override;
  bool fetch(uint64_t block, const Range& range, std::byte* output) override;
  bool reads_private_memory() const override { return entries_ > 0; }

 private:
  // Where a member's buffers of one part lie in its memory; 0: look into its slot. Written in begin(),
  // read while a block is reduced or consumed, so the progress counters order both.
  struct Entry {
    uintptr_t input = 0;
    uintptr_t result = 0;
  };
  static constexpr size_t kMostEntries = 256;  // of one bucket; further parts are staged
  static constexpr int32_t kStaged = -1;

  Entry& entry(int member, int32_t index) const;
  Entry entry_of(int member, const Range& range) const;
  Entry announcement(const Part& part) const;
  bool pull(int member, uintptr_t from, std::byte* to, size_t bytes) const;

  StagedExchange& staged_;
  const HostProgressTable& progress_;
  Entry* const table_;
  const int member_;
  const std::vector<Peer> peers_;
  const size_t least_bytes_;
  const size_t scratch_step_;
  std::vector<std::byte> scratch_;  // one member's stripe after the other
  std::span<const Part> parts_;
  std::vector<int32_t> entry_of_part_;
  size_t entries_ = 0;
};

}  // namespace farandole
