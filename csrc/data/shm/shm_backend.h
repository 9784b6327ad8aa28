// SPDX-License-Identifier: Apache-2.0
// The backend for one host: streams buckets through small shared slots that stay in cache. The driver only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/backend/backend.h"
#include "data/shm/exchange.h"
#include "data/shm/host_progress.h"
#include "data/shm/shm_schedule.h"
#include "lib/ipc/event_count.h"

namespace farandole {

// Each block is staged, reduced and consumed. Each phase has its own cursor, so a member that waits for its
// peers stages up to `slots` blocks ahead. Results depend bit by bit on member order only.
class ShmBackend final : public Backend {
 public:
  // members to direct_bytes, and locals: equal on all members.
  struct Setup {
    int member = 0;
    int members = 1;
    std::byte* memory = nullptr;       // zeroed, mapped by all members, aligned to 64
    size_t bytes = 0;                  // at least bytes_needed()
    std::vector<EventCount*> wakeups;  // one per member, this one included
    size_t block_bytes = kBlockBytes;
    int slots = kSlots;
    size_t direct_bytes = kDirectBytes;  // see ShmSchedule
    HostArenas* arenas = nullptr;        // for zero copy; must outlive the backend
    std::vector<int> locals = {};        // with arenas: local ranks of the members
    PhaseWatch watch = {};
  };
  static constexpr size_t kBlockBytes = 512 * 1024;
  static constexpr int kSlots = 4;
  static constexpr size_t kDirectBytes = 128 * 1024;

  // Throws kInvalidArgument.
  explicit ShmBackend(const Setup& setup);
  static size_t bytes_needed(int members, size_t block_bytes, int slots);

  void begin(std::span<const Part> parts) override;
  Progress step() override;
  bool ready() const override;
  void abort() override;

 private:
  using Column = HostProgressTable::Column;

  Block& block(uint64_t index) { return blocks_[index % blocks_.size()]; }
  const Block& block(uint64_t index) const { return blocks_[index % blocks_.size()]; }

  bool can_stage() const;
  bool can_reduce() const;
  bool can_consume() const;
  bool finished() const;

  void plan_next();
  void stage();
  void reduce();
  void consume();
  void keep(const Range& range);
  void reduce_range(const Block& block, const Range& range);
  bool overwrites_own_input(const Part& part, const Range& range) const;
  void combine(const Part& part, size_t bytes, size_t step);
  void publish(Column column, uint64_t blocks);
  void ring_peers();

  const int member_;
  const int members_;
  const uint64_t slots_;
  const std::vector<EventCount*> wakeups_;
  HostProgressTable progress_;
  Exchange exchange_;
  ShmSchedule plan_;
  const PhaseWatch watch_;
  std::span<const Part> parts_;
  std::vector<Block> blocks_;  // in flight, and the next one to stage
  struct {
    std::vector<const std::byte*> inputs;  // inputs of reduce_range()
    std::vector<std::byte*> targets;       // its outputs; the first one is in the nearest cache
    std::vector<const void*> chunk;        // inputs at the current chunk
  } scratch_;
  bool has_next_ = false;  // block(at_.staged) is scheduled
  bool aborted_ = false;
  struct {
    uint64_t staged = 0;  // copies of this member's counters
    uint64_t reduced = 0;
    uint64_t consumed = 0;
    uint64_t shown = 0;  // once all have consumed so many blocks, nobody reads my inputs any more
  } at_;
};

}  // namespace farandole
