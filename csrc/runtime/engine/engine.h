// SPDX-License-Identifier: Apache-2.0
// One rank's work in steps that never block: read the log, move blocks, finish handles. The Driver calls
// step(), on the background thread or on a caller that waits.
#pragma once

#include <functional>
#include <mutex>

#include "control/hosts/host_controller.h"
#include "runtime/engine/buckets.h"
#include "runtime/engine/gpu_buckets.h"
#include "runtime/engine/lane_set.h"

namespace farandole {

class Engine {
 public:
  struct Setup {
    const Topology& topology;
    HostLinks& links;
    MemberChannel& channel;
    HostController* leader;  // on the host's leader; else null
    RankCalls& calls;
    Recorder& recorder;
    // On the job's failure, or the first of a kind; called by the driver.
    std::function<void(const Failure&)> on_failure;
    OpenLane open_lane;
    Segment world_staging;
    std::function<void()> report_stacks;  // the coordinator asks for this rank's; must not block
  };
  explicit Engine(Setup setup);

  // ---- The driver only
  // Control messages first, then one block of each lane. False: nothing to do until somebody wakes us.
  bool step();
  // Reports and the log only; moves no tensors.
  bool control_step();
  // Fails everything with this, now and later.
  void give_up(const Failure& failure);
  // For shutdown, after the background thread ended: sends the last reports, such as why this rank left.
  bool say_last();

  // ---- Any thread
  // Whether step() would do something. Whatever makes it true has to call notify().
  bool has_work() const;
  bool moving() const;  // a bucket is in flight
  // When step() has something to do without being woken; see Driver::sleeps_past_tick().
  Deadline next_tick() const;
  // See GpuBuckets; under RankCalls::mutex.
  void use_gpu(RankGpu& gpu);
  GpuBuckets& gpu() { return gpu_; }

 private:
  bool control();
  bool say();
  void apply(const Entry& entry);
  void on(const Run& run);
  void on(const Result& result);
  void on(const Fail& fail);
  void on(const Joined& joined);
  void on(const Matched& matched);
  void on(const OpenSet& open);
  void on(const CloseSet& close);
  void on(const Inform& inform);
  void on(const SetUp& step);
  void act_on(Failure found);
  void break_down(const Failure& failure);
  Segment take_staging(SetId id);  // of a set being opened; made by the leader

  const Topology& topology_;
  HostLinks& links_;
  MemberChannel& channel_;
  HostController* leader_;
  RankCalls& calls_;
  Recorder& recorder_;
  const std::function<void()> report_stacks_;
  // Taken before RankCalls::mutex. The driver holds it during a step; other threads to check for work.
  mutable std::mutex work_mutex_;
  uint64_t log_position_ = 0;            // entries read; equal on all ranks
  std::atomic<bool> log_closed_{false};  // this rank has given up and reads no more of the log
  Finisher finisher_;
  BucketMaker buckets_;
  LaneSet lanes_;
  GpuBuckets gpu_;
};

}  // namespace farandole
