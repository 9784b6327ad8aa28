// SPDX-License-Identifier: Apache-2.0
// The backend for sets on several hosts (hierarchical allreduce). Each host reduces in shared memory, workers exchange
// partial results over the wire, and results return through shared memory. Used only by the driver.
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

// Decides when to poll a wire that cannot wake a thread, at intervals that double up to a limit. Detects a silent wire.
class WirePatience {
 public:
  // `silence_ns` is the longest allowed silence while a bucket is in flight; 0 means no limit. `names` are the names of
  // all members, for error texts.
  WirePatience(int64_t silence_ns, std::vector<std::string> names)
      : silence_ns_(silence_ns), names_(std::move(names)) {}

  void start() { last_message_ = now_ns(), interval_ = kShortest; }
  // Call this after progress, so that the next poll follows soon.
  void moved() { interval_ = kShortest, next_look_ = 0; }
  void message() { last_message_ = now_ns(); }
  // Call this if there was no progress. `wakes` is Wire::wakes(). Returns false if the wire has been silent too long.
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
  static constexpr int64_t kWoken = 50'000'000;  // interval between checks for silence if `wakes`
  const int64_t silence_ns_;
  const std::vector<std::string> names_;
  int64_t interval_ = 0;      // time until the next poll
  int64_t next_look_ = 0;     // time of the next poll
  int64_t last_message_ = 0;  // time when a message last completed or a bucket started
};

// A block goes through these phases: staged (inputs are in shared memory) -> reduced (this host's partials are made and
// sent) -> combined (all hosts' partials are reduced, and the results are sent) -> published (results are in shared
// memory) -> consumed. Each phase has its own cursor over a few slots. Inputs are reduced in member order and partials
// in host order, so all members get the same bits.
class HierarchicalBackend final : public Backend {
 public:
  struct Setup {
    HostMap hosts;  // hosts of the set's members
    int member = 0;
    std::byte* memory = nullptr;       // zeroed, mapped by this host's members, aligned to 64
    size_t bytes = 0;                  // at least bytes_needed()
    std::vector<Wakeup> wakeups = {};  // one for each member on this host
    std::unique_ptr<Wire> wire = nullptr;
    HierarchicalSchedule::Sizes sizes = {};
    int slots = kSlots;  // same on all members
    double silence = 0;  // seconds without a message until a bucket fails; 0 means never
    std::vector<std::string> names = {};  // names of all members, for error texts
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
  bool has_next_ = false;  // true if transfer(at_.staged) is scheduled
  bool aborted_ = false;
  struct {
    // Numbers of blocks, counted over all buckets.
    uint64_t staged = 0, reduced = 0, combined = 0, published = 0, consumed = 0;
    uint64_t settled = 0;  // number of blocks whose messages are all complete
  } at_;
};

}  // namespace farandole
