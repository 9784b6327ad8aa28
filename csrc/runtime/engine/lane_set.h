// SPDX-License-Identifier: Apache-2.0
// The lanes of this rank's process sets, which don't wait for each other. The driver only.
#pragma once

#include <functional>
#include <map>
#include <memory>

#include "data/backend/lane.h"
#include "lib/ipc/segment.h"
#include "runtime/calls/process_sets.h"

namespace farandole {

// Opens the lane of a set of which this rank is a member, on the memory that the members share.
using OpenLane = std::function<std::unique_ptr<Lane>(SetId, const ProcessSet&, Segment&, Feeds)>;

class LaneSet {
 public:
  explicit LaneSet(OpenLane make) : make_(std::move(make)) {}

  void open(SetId id, const ProcessSet& set, Segment staging) {
    Opened opened{std::move(staging), nullptr};
    opened.lane = make_(id, set, opened.staging, Feeds::kHost);
    lanes_.emplace(id, std::move(opened));
  }
  // nullptr: this rank is no member.
  Lane* find(SetId id) {
    auto found = lanes_.find(id);
    return found == lanes_.end() ? nullptr : found->second.lane.get();
  }
  // A lane for GPU buckets staged through host memory; it is not added to this set.
  std::unique_ptr<Lane> make(SetId id, const ProcessSet& set, Segment& staging) {
    return make_(id, set, staging, Feeds::kGpu);
  }
  void close(SetId id) { lanes_.erase(id); }

  // Moves one block of each lane. False: all wait.
  bool step() {
    bool moved = false;
    for (auto& [id, opened] : lanes_) moved |= opened.lane->step();
    return moved;
  }
  bool ready() const {
    return any([](const Lane& lane) { return lane.ready(); });
  }
  bool busy() const {
    return any([](const Lane& lane) { return lane.busy(); });
  }
  Deadline look_again() const {
    Deadline soonest = Deadline::never();
    for (const auto& [id, opened] : lanes_) soonest = std::min(soonest, opened.lane->look_again());
    return soonest;
  }
  void abort(const Failure& failure) {
    for (auto& [id, opened] : lanes_) opened.lane->abort(failure);
  }

 private:
  struct Opened {
    Segment staging;  // must outlive the lane
    std::unique_ptr<Lane> lane;
  };
  template <class Predicate>
  bool any(Predicate&& holds) const {
    for (const auto& [id, opened] : lanes_) {
      if (holds(*opened.lane)) return true;
    }
    return false;
  }

  const OpenLane make_;
  std::map<SetId, Opened> lanes_;
};

}  // namespace farandole
