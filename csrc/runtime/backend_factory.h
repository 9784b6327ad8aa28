// SPDX-License-Identifier: Apache-2.0
// Creates the backend of a process set on host memory (shared-memory or hierarchical).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/backend/backend.h"
#include "runtime/calls/tables.h"
#include "runtime/fabric.h"

namespace farandole {

class BackendFactory {
 public:
  // `phases_of` returns what records how a set's backend spends its time.
  BackendFactory(const Config& config, const Topology& topology, const Fabric& fabric,
                 std::function<PhaseWatch(SetId)> phases_of)
      : config_(config), topology_(topology), fabric_(fabric), phases_of_(std::move(phases_of)) {}

  // The shared memory that a set of these ranks needs on this host. A pair's is allocated as it is used.
  SegmentSize staging_size(SetId id, const std::vector<Rank>& ranks) const;
  // For a set of which this rank is a member; `staging` is the memory that its members share.
  std::unique_ptr<Backend> open_backend(SetId id, const ProcessSet& set, Segment& staging,
                                        Feeds feeds) const;
  // For the same; null if its members are not all on this host.
  std::shared_ptr<Cell> open_cell(SetId id, const ProcessSet& set,
                                  const std::shared_ptr<Segment>& staging, Spin spin) const;

 private:
  std::vector<std::string> names_of(const ProcessSet& set) const;
  std::unique_ptr<Backend> backend_across_hosts(SetId id, const ProcessSet& set, Segment& staging,
                                                Feeds feeds,
                                                std::vector<EventCount*> wakeups) const;

  const Config& config_;
  const Topology& topology_;
  const Fabric& fabric_;
  const std::function<PhaseWatch(SetId)> phases_of_;
};

}  // namespace farandole
