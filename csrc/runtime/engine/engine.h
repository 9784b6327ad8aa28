// SPDX-License-Identifier: Apache-2.0
// One rank's part in the work, as steps that never block: read the log, move blocks, finish handles.
// Whoever drives calls step(): the background thread, or a caller blocked in wait.
#pragma once

#include <functional>
#include <mutex>

#include "control/hosts/host_leader.h"
#include "runtime/engine/bucket_maker.h"
#include "runtime/engine/finisher.h"
#include "runtime/engine/gpu_buckets.h"
#include "runtime/engine/lane_set.h"

namespace farandole {

class Engine {
 public:
  struct Setup {
    const Topology& topology;
    HostLinks& links;
    MemberChannel& channel;
    HostLeader* leader;  // on the host's lowest rank
    RankCalls& calls;
    Recorder& recorder;
    std::function<void(const Failure&)>
        on_failure;  // of the job, or the first of a kind; the driver
    OpenLane open_lane;
    Segment world_staging;
    std::function<void()> tell_whereabouts;  // the coordinator wants this rank's; must not block
  };
  explicit Engine(Setup setup);

  // ---- the driver only
  // Control first, then one block of each lane. False: nothing to do before somebody rings our bell.
  bool step();
  // Reports and the log, no bytes of buckets.
  bool control_step();
  // Everything fails with this, now and later.
  void give_up(const Failure& failure);
  // Before the engine goes: the thread that would have passed on why this rank left may have ended first.
  bool say_last();

  // ---- any thread
  // Whether step() would do something. Followed by a notify() wherever it becomes true.
  bool has_work() const;
  bool moving() const;  // a bucket has begun
  // When step() has something to do though no bell has rung: a driver that leaves hands that on.
  Deadline next_tick() const;
  // As GpuBuckets has it, under the mutex of the calls.
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
  void on(const OpenSet& open);
  void on(const CloseSet& close);
  void on(const Bundle& bundle);
  void on(const Inform& inform);
  void on(const OpenGpu& open);
  void on(const GpuKey& key);
  void act_on(Failure found);
  void break_down(const Failure& failure);
  Segment take_staging(SetId id);  // of a set that opens: made by the leader

  const Topology& topology_;
  HostLinks& links_;
  MemberChannel& channel_;
  HostLeader* leader_;
  RankCalls& calls_;
  Recorder& recorder_;
  const std::function<void()> tell_whereabouts_;
  // Locked before the mutex of the calls: the driver holds it while it steps; others, to see whether there is work.
  mutable std::mutex work_mutex_;
  uint64_t log_position_ = 0;      // entries read: every rank counts alike
  std::atomic<bool> deaf_{false};  // this rank has given up: it reads the log no more
  Finisher finisher_;
  BucketMaker buckets_;
  LaneSet lanes_;
  GpuBuckets gpu_;
};

}  // namespace farandole
