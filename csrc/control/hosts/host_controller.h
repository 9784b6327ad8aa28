// SPDX-License-Identifier: Apache-2.0
// The work of a host's leader: it receives the reports of the host's ranks and distributes the log to them. Rank 0 also
// runs the coordinator. The other leaders pass reports up and the log down.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "control/bootstrap/host_links.h"
#include "control/channel/host_channel.h"
#include "control/channel/shm_channel.h"
#include "control/coordinator/coordinator.h"
#include "control/hosts/aggregator.h"
#include "control/hosts/host_tree.h"
#include "control/protocol/message.h"
#include "lib/os/process.h"

namespace farandole {

class HostController {
 public:
  // Returns the size of the shared memory that a set's lane needs on this host.
  using StagingSize = std::function<SegmentSize(SetId, const std::vector<Rank>&)>;
  struct Setup {
    LeaderChannel channel;         // to the ranks of this host
    HostChannel* hosts = nullptr;  // to other hosts; null if there are none
    HostTree tree;
    HostLinks& links;
    const Topology& topology;
    std::vector<std::string> host_names;  // by rank
    StagingSize staging_size;
    std::vector<pid_t> pids;  // by rank; 0 on another host or in another PID namespace
  };
  explicit HostController(Setup setup) : setup_(std::move(setup)) {}
  virtual ~HostController() = default;

  // ---- Only the driver may call these. step() returns false if there was nothing to do.
  virtual bool step() = 0;
  virtual Deadline next_tick() const = 0;
  // Call this when the job has failed on this leader. Sends `why` to the ranks that get the log only from this leader.
  virtual void leave(const Failure& why) = 0;
  // Returns the leader's own mapping of a set's memory. Call this after share_memory().
  Segment take_staging(SetId set);
  // For rank 0, after step(). Return warnings about stalls, and the ranks that were the last to be ready.
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  const std::vector<Coordinator::LateRank>& late_ranks() const { return late_; }

  // ---- May be called from any thread
  bool has_work() const {
    return setup_.channel.has_report() || has_lost_ ||
           (setup_.hosts && setup_.hosts->has_message());
  }
  // True if the other ranks of this host can read the whole log without this process.
  bool delivered() const { return setup_.channel.delivered(); }
  // Reports the death of a rank on this host. The caller must wake the driver.
  void lose(Rank rank, Failure failure);

 protected:
  // Sends the entry to the ranks of this host, and adds it to the next message for the hosts below.
  void publish(ByteView entry);
  void send_down();
  // Call this before sending a log entry. Sends the memory that the entry needs to the ranks of this host. Throws
  // Error(kLibrary) if memory is short.
  void share_memory(const Entry& entry);
  std::vector<std::pair<Rank, Failure>> take_lost();
  // Returns a text such as "rank 3 on node7".
  std::string rank_on_host(Rank rank) const;
  // `how` is the text from HostChannel::drain().
  Failure host_is_gone(Rank leader, const std::string& how) const;
  const HostTree::Branch& branch_of(Rank leader) const;
  // Returns the failure that ends the job after an invalid message from `rank`.
  static Failure broke_protocol(Rank rank, const Error& error);
  // Calls tell(rank, StackReport) for those ranks that are on this host and cannot answer because they are stopped.
  template <class Tell>
  void answer_for_stopped(const std::vector<Rank>& ranks, Tell&& tell) {
    for (Rank rank : ranks) {
      const pid_t pid = setup_.pids[static_cast<size_t>(rank)];
      if (pid == 0 || !is_stopped(pid)) continue;
      const std::string id = std::to_string(pid);
      tell(rank, StackReport{true, "pid " + id + ": `kill -CONT " + id + "` resumes it"});
    }
  }

  Setup setup_;
  std::vector<std::string> notices_;
  std::vector<Coordinator::LateRank> late_;

 private:
  void share_staging(SetId set, const std::vector<Rank>& ranks);

  // The leader's mappings, by set. A pair may have one for CPU buckets and one for GPU buckets.
  std::multimap<SetId, Segment> staging_;
  ByteString down_;  // entries to send to the hosts below
  std::mutex lost_mutex_;
  std::vector<std::pair<Rank, Failure>> lost_;
  std::atomic<bool> has_lost_{false};
};

class RootController final : public HostController {
 public:
  RootController(Coordinator::Settings settings, Setup setup);

  bool step() override;
  Deadline next_tick() const override { return Deadline::at(coordinator_.next_tick()); }
  void leave(const Failure&) override {}  // nothing to send, because step() has published the Abort

 private:
  template <class Receive>
  void receive(Rank from, ByteView message, Receive&& receive);
  void hear(Rank child, ByteView message);
  void publish_all();
  bool prepare(Entry& entry);

  Coordinator coordinator_;
  std::map<Rank, int> groups_;  // number of each child leader's group in the coordinator
  std::vector<Entry> entries_;
  ByteString encoded_;
};

class HostRelay final : public HostController {
 public:
  explicit HostRelay(Setup setup);
  bool step() override;
  Deadline next_tick() const override { return Deadline::at(aggregator_.next_tick()); }
  void leave(const Failure& why) override;

 private:
  void hear(Rank peer, ByteView message);
  void read_log(ByteView entries);
  void read(const Entry& entry);
  void report(Rank from, const Report& report);
  void lose_host(Rank peer, const std::string& how);
  void abort_below(const Failure& why);

  Aggregator aggregator_;
  ByteString encoded_;
  Failure lost_;       // the first death on this host
  bool over_ = false;  // has read an Abort or Stop, or has lost the link to the host above
};

}  // namespace farandole
