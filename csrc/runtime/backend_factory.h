// SPDX-License-Identifier: Apache-2.0
// Creates the backend of a process set for host memory: ShmBackend or HierarchicalBackend.
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
  // `phases_of` returns the PhaseWatch for a set's backend.
  BackendFactory(const Config& config, const Topology& topology, const Fabric& fabric,
                 std::function<PhaseWatch(SetId)> phases_of)
      : config_(config), topology_(topology), fabric_(fabric), phases_of_(std::move(phases_of)) {}

  // Size of the shared memory that a set of these ranks needs on this host. A pair's memory is allocated on first use.
  SegmentSize staging_size(SetId id, const std::vector<Rank>& ranks) const;
  // Opens the backend of `set`, which contains this rank. The set's members on this host share the memory `staging`.
  std::unique_ptr<Backend> open_backend(SetId id, const ProcessSet& set, Segment& staging,
                                        Feeds feeds) const;
  // Returns nullptr if the members are not all on this host, are too few or too many, or if the set is a pair.
  std::shared_ptr<Cell> open_cell(SetId id, const ProcessSet& set,
                                  const std::shared_ptr<Segment>& staging, Spin spin) const;

 private:
  std::vector<std::string> names_of(const ProcessSet& set) const;
  std::unique_ptr<Backend> backend_across_hosts(SetId id, const ProcessSet& set, Segment& staging,
                                                Feeds feeds, std::vector<Wakeup> wakeups) const;

  const Config& config_;
  const Topology& topology_;
  const Fabric& fabric_;
  const std::function<PhaseWatch(SetId)> phases_of_;
};

}  // namespace farandole
