// SPDX-License-Identifier: Apache-2.0
// One rank's work in steps that never block: read the log, move blocks, end calls. The Driver calls step(), on the
// background thread or on a caller that waits.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "control/bootstrap/host_links.h"
#include "control/hosts/host_controller.h"
#include "data/backend/backend.h"
#include "lib/ipc/segment.h"
#include "runtime/calls/rank_calls.h"
#include "runtime/gpu/rank_gpu.h"

namespace farandole {

// Opens the lane of a set of which this rank is a member, on the memory that the members share.
using OpenLane = std::function<std::unique_ptr<Lane>(SetId, const ProcessSet&, Segment&, Feeds)>;

// The cell of such a set, which keeps the memory; null: it has none.
using OpenCell =
    std::function<std::shared_ptr<Cell>(SetId, const ProcessSet&, const std::shared_ptr<Segment>&)>;

// The lanes of this rank's process sets, which don't wait for each other. The driver only.
class Lanes {
 public:
  explicit Lanes(OpenLane make) : make_(std::move(make)) {}

  void open(SetId id, const ProcessSet& set, const std::shared_ptr<Segment>& staging);
  // nullptr: this rank is no member.
  Lane* find(SetId id);
  void push(SetId id, Bucket bucket);
  // A lane for GPU buckets staged through host memory; it is not added to these.
  std::unique_ptr<Lane> make(SetId id, const ProcessSet& set, Segment& staging) {
    return make_(id, set, staging, Feeds::kGpu);
  }
  void close(SetId id) { lanes_.erase(id); }
  // Moves one block of each lane. False: all wait.
  bool step();
  bool ready() const;
  bool busy() const;
  Deadline look_again() const;
  void abort(const Failure& failure);

 private:
  struct Opened {
    std::shared_ptr<Segment> staging;  // must outlive the lane
    std::unique_ptr<Lane> lane;
  };
  // Between messages, this rank's pairs keep so much memory together.
  static constexpr size_t kMostHeld = size_t{8} << 20;
  void use_pair(Lane& lane);
  void free_pairs();

  const OpenLane make_;
  std::map<SetId, Opened> lanes_;
  std::vector<Lane*> pairs_;  // the least recently used first
  bool still_read_ = false;   // free_pairs() could not free one of them yet
};

// The same for this rank's GPU, which has one lane: opens sets' backends on it, and decides when buckets are launched.
class GpuBuckets {
 public:
  explicit GpuBuckets(RankCalls& calls) : calls_(calls) {}

  // ---- Any thread
  // This rank uses a GPU from now on.
  void use(RankGpu& gpu) { gpu_ = &gpu; }
  // A user waits for these handles; with FARANDOLE_GPU_ORDER=program only then buckets are launched. A wait
  // that began before the GPU was opened calls this again after its next interruption.
  void want(std::span<const Handle> handles);
  void unwant(std::span<const Handle> handles);

  // ---- The driver
  std::shared_ptr<GpuDevice> device() const;  // nullptr: none is in use yet
  RankGpu& gpu() const { return *gpu_.load(); }
  // Host memory of a set whose GPU tensors travel through it.
  Segment& staging(SetId set) { return staging_[set]; }
  void push(SetId set, BegunRun run);
  bool step();
  bool ready() const;
  void close(SetId set, const Failure& failure);
  // `together`: all ranks have left.
  void abort(const Failure& failure, bool together);

 private:
  bool may_launch() const;
  bool send_key();

  RankCalls& calls_;
  std::atomic<RankGpu*> gpu_{nullptr};
  std::map<SetId, Segment> staging_;
  mutable std::mutex wanted_mutex_;
  std::multiset<Handle> wanted_;
};

class Engine {
 public:
  struct Setup {
    const Topology& topology;
    HostLinks& links;
    MemberChannel& channel;
    HostController* leader;  // on the host's leader; else null
    RankCalls& calls;
    Recorder& recorder;
    OpenLane open_lane;
    OpenCell open_cell;
    std::function<void()> report_stacks;  // the coordinator asks for this rank's; must not block
    std::function<void(const std::string&)> tell_finding;  // see RankWatch
  };
  Engine(Setup setup, Segment world_staging);

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
  void use_gpu(RankGpu& gpu);
  GpuBuckets& gpu() { return gpu_; }

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
  void act_on(Failure found);
  void break_down(const Failure& failure);
  Segment take_staging(SetId id);  // of a set being opened; made by the leader

  const Setup setup_;
  RankCalls& calls_;
  // Taken before the mutex of RankCalls. The driver holds it during a step; other threads to check for work.
  mutable std::mutex work_mutex_;
  uint64_t log_position_ = 0;            // entries read; equal on all ranks
  std::atomic<bool> log_closed_{false};  // this rank has given up and reads no more of the log
  Lanes lanes_;
  GpuBuckets gpu_;
};

}  // namespace farandole
