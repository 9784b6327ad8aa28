// SPDX-License-Identifier: Apache-2.0
// Collectives across hosts: partial results in each host's shared memory, messages between the workers
// of equal stripes, results in each host's shared memory. Blocks overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/hierarchical/cross_plan.h"
#include "data/hierarchical/cross_worker.h"
#include "data/hierarchical/flight.h"
#include "data/hierarchical/wire.h"
#include "data/hierarchical/wire_patience.h"
#include "data/plane/phase.h"
#include "data/plane/plane.h"
#include "data/shm/host_progress.h"
#include "lib/ipc/event_count.h"

namespace farandole {

// A block is staged (input to where neighbours reach it), reduced (partials of this host, sent), combined
// (partials of all hosts, results sent), published (results that arrived) and consumed. Each phase has
// its own cursor over a few slots. Sums are taken in member order inside a host, then in host order,
// whatever arrives first: the same bits on all members.
class CrossPlane final : public Plane {
 public:
  struct Setup {
    HostMap hosts;  // of the set's members
    int member = 0;
    std::byte* memory = nullptr;          // zeroed, mapped by this host's members, aligned to 64
    size_t bytes = 0;                     // at least bytes_needed()
    std::vector<EventCount*> bells = {};  // of this host's members
    std::unique_ptr<Wire> wire = nullptr;
    CrossPlan::Sizes sizes = {};
    int slots = kSlots;  // as many on all members
    double silence = 0;  // seconds without a message after which a bucket fails; 0: never
    PhaseWatch watch = {};
  };
  static constexpr int kSlots = 16;

  // Throws kInvalidArgument.
  explicit CrossPlane(Setup setup);
  // local_members: of one host.
  static size_t bytes_needed(int local_members, size_t block_bytes, int slots);

  const char* name() const override { return "cross"; }
  bool supports(const Signature& signature) const override;
  void begin(std::span<const Part> parts) override;
  Progress step() override;
  bool ready() const override;
  Deadline look_again() const override;
  void abort() override;

 private:
  using Column = HostProgressTable::Column;

  Flight& flight(uint64_t index) { return flights_[index % flights_.size()]; }
  const Flight& flight(uint64_t index) const { return flights_[index % flights_.size()]; }

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
  const std::vector<EventCount*> bells_;
  HostProgressTable progress_;  // of this host's members
  const std::unique_ptr<Wire> wire_;
  CrossPlan plan_;
  CrossWorker worker_;
  std::span<const Part> parts_;
  std::vector<Flight> flights_;
  bool has_next_ = false;  // flight(at_.staged) is planned
  bool aborted_ = false;
  struct {
    // Counts of blocks over all buckets.
    uint64_t staged = 0, reduced = 0, combined = 0, published = 0, consumed = 0;
    uint64_t settled = 0;  // all messages complete
  } at_;
};

}  // namespace farandole
