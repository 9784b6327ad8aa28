// SPDX-License-Identifier: Apache-2.0
// One rank's work in steps that never block: read the log, move blocks, end calls. The Driver calls step(), on the
// background thread or on a caller that waits.
#pragma once

#include <atomic>
#include <mutex>

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
    HostController* leader;  // on the host's leader; else null
    RankCalls& calls;
    RankWatch& watch;
    const BackendFactory& backends;
    Spin caller_spin;  // of a caller that waits in a cell
  };
  Engine(Setup setup, Segment world_staging);

  // ---- The driver only
  // Control messages first, then one block of each lane. False: nothing to do until somebody wakes us.
  bool step();
  // Reports and the log only; moves no tensors.
  bool control_step();
  // Ends the job, which this rank can't go on with.
  void give_up(const Failure& failure);
  // For shutdown, after the background thread ended: sends the last reports, such as why this rank left.
  bool say_last();

  // ---- Any thread
  // Whether step() would do something. Whatever makes it true has to call notify().
  bool has_work() const;
  bool moving() const;  // a bucket is in flight
  // When step() has something to do without being woken; see Driver::sleeps_past_tick().
  Deadline next_tick() const;
  void use_gpu(RankGpu& gpu);
  GpuBuckets& gpu() { return gpu_; }
  // Entries of the log that this rank has read. More of them: rank 0 runs, and who passes its words on.
  uint64_t log_position() const { return log_position_; }
  // The last call that the main thread began to wait for without end; it may be over.
  std::atomic<Handle> main_waits_for{0};

 private:
  bool control();
  bool say();
  void apply(const Entry& entry);
  void on(const Run& run);
  void on(const OpenSet& open);
  void on(const CloseSet& close);
  void on(const SetUp& step);
  void on(const Notice& notice);
  void open(SetId id, Segment staging);
  void tell_of_ranks();
  void report_stacks();
  void act_on(Failure found);
  void break_down(const Failure& failure);
  void release(const Failure& failure);  // of a job that is broken: buffers, then all that waits
  Segment take_staging(SetId id);        // of a set being opened; made by the leader

  const Setup setup_;
  RankCalls& calls_;
  // Taken before the mutex of RankCalls. The driver holds it during a step; other threads to check for work.
  mutable std::mutex work_mutex_;
  std::atomic<uint64_t> log_position_{0};
  Lanes lanes_;
  GpuBuckets gpu_;
};

}  // namespace farandole
