// SPDX-License-Identifier: Apache-2.0
// The backend between hosts (hierarchical allreduce): each host reduces in shared memory, workers exchange partial
// results over the wire, and results return through shared memory. Driver only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "data/backend/backend.h"
#include "data/hierarchical/block_transfer.h"
#include "data/hierarchical/hierarchical_schedule.h"
#include "data/hierarchical/hierarchical_worker.h"
#include "data/hierarchical/wire.h"
#include "data/shm/shm_schedule.h"
#include "lib/ipc/event_count.h"

namespace farandole {

// Decides when to poll a wire that cannot wake a thread: at intervals that double up to a limit. Detects a silent wire.
class WirePatience {
 public:
  // `silence_ns`: longest silence while a bucket is in flight; 0: no limit. `names`: names of all members, for errors.
  WirePatience(int64_t silence_ns, std::vector<std::string> names)
      : silence_ns_(silence_ns), names_(std::move(names)) {}

  void start() { last_message_ = now_ns(), interval_ = kShortest; }
  // Call it after progress: the next poll follows soon.
  void moved() { interval_ = kShortest, next_look_ = 0; }
  void message() { last_message_ = now_ns(); }
  // Call it if there was no progress. `wakes`: Wire::wakes(). False: the wire has been silent for too long.
  bool wait(bool wakes) {
    const int64_t now = now_ns();
    next_look_ = now + (wakes ? kWoken : interval_);
    interval_ = std::min(2 * interval_, kLongest);
    return silence_ns_ == 0 || now - last_message_ < silence_ns_;
  }
  Deadline next_look() const { return Deadline::at(next_look_); }
  int64_t silence_ns() const { return silence_ns_; }
  const std::string& name(int member) const { return names_.at(static_cast<size_t>(member)); }

 private:
  static constexpr int64_t kShortest = 10'000;
  static constexpr int64_t kLongest = 200'000;
  static constexpr int64_t kWoken = 50'000'000;  // interval of checks for silence if `wakes`
  const int64_t silence_ns_;
  const std::vector<std::string> names_;
  int64_t interval_ = 0;      // until the next poll
  int64_t next_look_ = 0;     // time of the next poll
  int64_t last_message_ = 0;  // when a message completed, or a bucket started
};

// Phases of a block: staged (inputs in shared memory) -> reduced (this host's partials made and sent) -> combined (all
// hosts' partials reduced, results sent) -> published (results in shared memory) -> consumed. Each phase has its own
// cursor over a few slots. Inputs are reduced in member order, partials in host order: all members get the same bits.
class HierarchicalBackend final : public Backend {
 public:
  struct Setup {
    HostMap hosts;  // hosts of the set's members
    int member = 0;
    std::byte* memory = nullptr;       // zeroed, mapped by this host's members, aligned to 64
    size_t bytes = 0;                  // at least bytes_needed()
    std::vector<Wakeup> wakeups = {};  // for each member on this host
    std::unique_ptr<Wire> wire = nullptr;
    HierarchicalSchedule::Sizes sizes = {};
    int slots = kSlots;  // equal on all members
    double silence = 0;  // seconds without a message until a bucket fails; 0: never
    std::vector<std::string> names = {};  // of all members, for errors
    PhaseWatch watch = {};
  };
  static constexpr int kSlots = 16;

  explicit HierarchicalBackend(Setup setup);
  static size_t bytes_needed(int local_members, size_t block_bytes, int slots);

  void begin(std::span<const Part> parts) override;
  Progress step() override;
  bool ready() const override;
  Deadline look_again() const override;
  void abort() override;
  size_t held() const override;
  void rest() override;

 private:
  using Column = HostProgressTable::Column;

  BlockTransfer& transfer(uint64_t index) { return transfers_[index % transfers_.size()]; }
  const BlockTransfer& transfer(uint64_t index) const {
    return transfers_[index % transfers_.size()];
  }

  void plan_next();

  bool can_stage() const;
  bool can_reduce() const;
  bool can_combine() const;
  bool can_publish() const;
  bool can_consume() const;
  bool finished() const;

  void stage();
  void reduce();
  void combine();
  void publish();
  void consume();
  bool poll();
  void wait_for_wire();
  std::string awaited() const;
  void store(Column column, uint64_t blocks);

  const HostMap hosts_;
  const int member_;
  const std::vector<int>& locals_;
  const uint64_t slots_;
  WirePatience patience_;
  const PhaseWatch watch_;
  std::vector<Wakeup> wakeups_;
  HostProgressTable progress_;
  const std::unique_ptr<Wire> wire_;
  HierarchicalSchedule plan_;
  HierarchicalWorker worker_;
  std::span<const Part> parts_;
  std::vector<BlockTransfer> transfers_;
  bool has_next_ = false;  // transfer(at_.staged) is scheduled
  bool aborted_ = false;
  struct {
    // Numbers of blocks, over all buckets.
    uint64_t staged = 0, reduced = 0, combined = 0, published = 0, consumed = 0;
    uint64_t settled = 0;  // blocks whose messages are all complete
  } at_;
};

}  // namespace farandole
