// SPDX-License-Identifier: Apache-2.0
// Collectives inside one host: a bucket streams block by block through small slots that stay in cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "data/plane/phase.h"
#include "data/plane/plane.h"
#include "data/shm/fusion_plan.h"
#include "data/shm/host_progress.h"
#include "data/shm/mapped_exchange.h"
#include "lib/ipc/event_count.h"

namespace farandole {

// Each block is staged, reduced and consumed; each phase has its own cursor, so a member that waits for
// its peers stages up to `slots` blocks ahead. Results depend on member order alone, bit by bit.
class HostPlane final : public Plane {
 public:
  struct Setup {
    int member = 0;
    int members = 1;
    std::byte* memory = nullptr;     // zeroed, mapped by all members, aligned to 64
    size_t bytes = 0;                // at least bytes_needed()
    std::vector<EventCount*> bells;  // one for each member, own included
    size_t block_bytes = kBlockBytes;
    int slots = kSlots;
    size_t direct_bytes =
        kDirectBytes;  // see FusionPlan; all but bells, member, arenas and watch alike on all members
    HostArenas* arenas =
        nullptr;  // for zero copy; all members have them, or none. Outlives the plane
    std::vector<int> locals = {};  // with arenas: the members' local ranks
    PhaseWatch watch = {};
  };
  static constexpr size_t kBlockBytes = 512 * 1024;
  static constexpr int kSlots = 4;
  static constexpr size_t kDirectBytes = 128 * 1024;

  // Throws kInvalidArgument.
  explicit HostPlane(const Setup& setup);
  static size_t bytes_needed(int members, size_t block_bytes, int slots);
  // Of every plane for host memory.
  static bool can_carry_out(const Signature& signature);

  const char* name() const override { return "host"; }
  bool supports(const Signature& signature) const override { return can_carry_out(signature); }
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
  const std::vector<EventCount*> bells_;
  HostProgressTable progress_;
  const std::unique_ptr<Exchange> exchange_;
  FusionPlan plan_;
  const PhaseWatch watch_;
  std::span<const Part> parts_;
  std::vector<Block> blocks_;  // those in flight, and the next one to stage
  struct {
    std::vector<const std::byte*> inputs;  // what reduce_range() combines
    std::vector<std::byte*> targets;       // and where to; the first is closest
    std::vector<const void*> chunk;        // of its current chunk
  } scratch_;
  bool has_next_ = false;  // block(at_.staged) is planned
  bool aborted_ = false;
  struct {
    uint64_t staged = 0;  // own copies of the three counters
    uint64_t reduced = 0;
    uint64_t consumed = 0;
    uint64_t shown = 0;  // when all have consumed so many blocks, nobody reads my inputs any more
  } at_;
};

}  // namespace farandole
