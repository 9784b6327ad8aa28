// SPDX-License-Identifier: Apache-2.0
// Which plane carries a process set's buckets on the host's memory, and the memory that it takes.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "data/plane/lane.h"
#include "data/plane/phase.h"
#include "runtime/calls/process_sets.h"
#include "runtime/fabric.h"

namespace farandole {

class PlaneFactory {
 public:
  // phases_of: whoever watches how a set's plane passes its time.
  PlaneFactory(const Config& config, const Topology& topology, const Fabric& fabric,
               std::function<PhaseWatch(SetId)> phases_of)
      : config_(config), topology_(topology), fabric_(fabric), phases_of_(std::move(phases_of)) {}

  // That a set of these ranks needs on this host.
  size_t staging_bytes(const std::vector<Rank>& ranks) const;
  // Of a set of which this rank is a member, on the memory that its members share.
  std::unique_ptr<Lane> open_lane(SetId id, const ProcessSet& set, Segment& staging,
                                  Feeds feeds) const;

 private:
  std::unique_ptr<Lane> lane_across_hosts(SetId id, const ProcessSet& set, Segment& staging,
                                          Feeds feeds, std::vector<EventCount*> bells) const;

  const Config& config_;
  const Topology& topology_;
  const Fabric& fabric_;
  const std::function<PhaseWatch(SetId)> phases_of_;
};

}  // namespace farandole
