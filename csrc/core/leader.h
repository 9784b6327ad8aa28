// SPDX-License-Identifier: Apache-2.0
// What rank 0 does for all: feeds the coordinator with reports and publishes its log. The driver only,
// but for lose().
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "control/channel.h"
#include "control/coordinator.h"
#include "control/meeting.h"

namespace farandole {

class Leader {
 public:
  // staging_bytes(members): what a process set's lane needs.
  using StagingBytes = std::function<size_t(int members)>;
  // Why a rank of this host stands still, as seen from outside; empty: it does not.
  using Standing = std::function<std::string(Rank)>;
  // A notice that some ranks wait for others; on the driver.
  using OnStall = std::function<void(const std::string&)>;
  Leader(Coordinator::Settings settings, std::unique_ptr<LeaderChannel> channel, HostLinks& links,
         const Topology& topology, StagingBytes staging_bytes, Standing standing, OnStall on_stall);

  // False: there was nothing to do.
  bool step();
  bool has_work() const { return channel_->has_report() || has_lost_; }
  Deadline next_tick() const { return Deadline::at(coordinator_.next_tick()); }
  // A rank has died. Any thread; then ring rank 0's bell.
  void lose(Rank rank, Failure failure);
  // The leader's own mapping of a set that it has just published.
  Segment take_staging(SetId set);

 private:
  void receive(Rank from, ByteView message);
  void take_lost();
  Entry prepare(Entry entry);
  void answer_for_standing(const WhereAre& where);

  Coordinator coordinator_;
  std::unique_ptr<LeaderChannel> channel_;
  HostLinks& links_;
  const Topology& topology_;
  StagingBytes staging_bytes_;
  Standing standing_;
  OnStall on_stall_;
  std::map<SetId, Segment> staging_;
  std::vector<Entry> entries_;
  ByteString encoded_;

  std::mutex lost_mutex_;
  std::vector<std::pair<Rank, Failure>> lost_;
  std::atomic<bool> has_lost_{false};
};

}  // namespace farandole
