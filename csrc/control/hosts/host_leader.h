// SPDX-License-Identifier: Apache-2.0
// What the lowest rank of a host does for the others on it: hears their reports and hands out the log. On
// rank 0 beside the coordinator (Leader), elsewhere between the host and the ones above and below (Relay).
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "control/bootstrap/meeting.h"
#include "control/channel/channel.h"
#include "control/channel/host_channel.h"
#include "control/hosts/host_tree.h"

namespace farandole {

class HostLeader {
 public:
  // What the lane of a process set of these ranks needs on this host.
  using StagingBytes = std::function<size_t(const std::vector<Rank>&)>;
  // Why a rank of this host stands still, as seen from outside; empty: it does not.
  using Standing = std::function<std::string(Rank)>;
  struct Setup {
    std::unique_ptr<LeaderChannel> channel;  // inside the host
    HostChannel* hosts = nullptr;            // to others; null: there is one host
    HostTree tree;
    HostLinks& links;
    const Topology& topology;
    std::vector<std::string> host_names;  // by rank
    StagingBytes staging_bytes;
    Standing standing;
  };
  explicit HostLeader(Setup setup) : setup_(std::move(setup)) {}
  virtual ~HostLeader() = default;

  // ---- the driver only. False: there was nothing to do.
  virtual bool step() = 0;
  virtual Deadline next_tick() const = 0;
  // The leader's own mapping of a set that it has just published.
  Segment take_staging(SetId set);

  // ---- any thread
  bool has_work() const {
    return setup_.channel->has_report() || has_lost_ ||
           (setup_.hosts && setup_.hosts->has_message());
  }
  // A rank of this host has died; then ring the own bell.
  void lose(Rank rank, Failure failure);

 protected:
  // To this host's ranks, and as part of the next message to the hosts below.
  void publish(ByteView entry);
  void send_down();
  // Memory travels ahead of the entry that needs it, so that nobody who reads the entry has to wait.
  // Throws Error(kLibrary) if there is none.
  void share_staging(SetId set, const std::vector<Rank>& ranks);
  std::vector<std::pair<Rank, Failure>> take_lost();
  // "rank 3 on node7"
  std::string place_of(Rank rank) const;
  // Why nothing comes from this leader any more, as its connection ended.
  std::string how_lost(Rank leader) const;
  Failure host_is_gone(const HostTree::Branch& branch) const;

  Setup setup_;

 private:
  std::map<SetId, Segment> staging_;
  ByteString down_;  // entries for the hosts below
  std::mutex lost_mutex_;
  std::vector<std::pair<Rank, Failure>> lost_;
  std::atomic<bool> has_lost_{false};
};

}  // namespace farandole
