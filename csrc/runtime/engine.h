// SPDX-License-Identifier: Apache-2.0
// Does one rank's work in steps that never block: reads the log, moves blocks, ends calls. The Driver calls step().
#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "control/bootstrap/host_links.h"
#include "control/hosts/host_controller.h"
#include "runtime/backend_factory.h"
#include "runtime/lanes.h"
#include "runtime/rank_watch.h"

namespace farandole {

class Engine {
 public:
  struct Setup {
    const Topology& topology;
    HostLinks& links;
    MemberChannel& channel;
    HostController* leader;  // null unless this rank is its host's leader
    RankCalls& calls;
    RankWatch& watch;
    const BackendFactory& backends;
    Spin caller_spin;  // for a caller that waits in a cell
    Poller* poller;    // null if no other host can send to this rank
  };
  Engine(Setup setup, Segment world_staging);

  // ---- Driver only
  // Handles control messages, then moves one block per lane. Returns false if there is nothing to do until a wake-up.
  bool step();
  bool control_step();
  // Ends the job because this rank cannot continue.
  void give_up(const Failure& failure);
  // Sends the last reports, such as why this rank has left. Call after the background thread has ended.
  bool say_last();

  // ---- Any thread
  // True if step() would do something. A thread that causes this to become true must call Wakeup::notify().
  bool has_work() const;
  bool moving() const;  // true while a bucket is in flight
  // Returns the time at which step() will have work even without a wake-up.
  Deadline next_tick() const;
  void use_gpu(RankGpu& gpu);
  GpuBuckets& gpu() { return gpu_; }
  // Number of log entries that this rank has read. While it grows, rank 0 and the leaders on the path to it are alive.
  uint64_t log_position() const { return log_position_; }
  std::optional<Stuck> oldest_bucket() const;  // nullopt if no bucket is under way on this rank
  // The handle for which the main thread waits without a time limit, or last waited. If a wait has several handles,
  // this is the first one that was unfinished when the wait started.
  std::atomic<Handle> main_waits_for{0};

 private:
  bool control();
  bool say();
  bool sockets_ready() const;
  void apply(const Entry& entry);
  void on(const Run& run);
  void on(const OpenSet& open);
  void on(const CloseSet& close);
  void on(const OpenGpu& step);
  void on(const Notice& notice);
  void open(SetId id, Segment staging);
  void tell_of_ranks();
  void report_stacks();
  void act_on(Failure found);
  void break_down(const Failure& failure);
  void release(const Failure& failure);  // releases buffers, then makes all pending calls fail
  Segment take_staging(SetId id);        // receives the leader's memory for a new set

  const Setup setup_;
  RankCalls& calls_;
  // Must be locked before RankCalls::mutex_. Held by the driver during a step, and by other threads to check for work.
  mutable std::mutex work_mutex_;
  std::atomic<uint64_t> log_position_{0};
  Lanes lanes_;
  GpuBuckets gpu_;
};

}  // namespace farandole
