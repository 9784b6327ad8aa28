// SPDX-License-Identifier: Apache-2.0
// One rank's part in the work, as steps that never block: read the log, move blocks, finish handles.
// Whoever drives calls step(): the background thread, or a caller blocked in wait.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "control/channel/channel.h"
#include "control/hosts/host_leader.h"
#include "control/prediction/bundler.h"
#include "data/plane/lane.h"
#include "runtime/calls/pending.h"
#include "runtime/calls/process_sets.h"
#include "watch/recorder.h"

namespace farandole {

class RankGpu;

class Engine {
 public:
  // Opens the lane of a set of which this rank is a member, on the memory that its members share.
  using OpenLane = std::function<std::unique_ptr<Lane>(SetId, const ProcessSet&, Segment&)>;
  struct Setup {
    const Topology& topology;
    HostLinks& links;
    MemberChannel& channel;
    HostLeader* leader;  // on the host's lowest rank
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
  // This rank has tensors on a GPU from here on. Under the mutex.
  void use_gpu(RankGpu& gpu);
  // Somebody waits for these: in program order that is when buckets on GPUs may be launched.
  void want(std::span<const Handle> handles);
  void unwant(std::span<const Handle> handles);
  // Whether step() would do something. Followed by a notify() wherever it becomes true.
  bool has_work() const;
  bool moving() const;  // a bucket has begun
  // When step() has something to do though no bell has rung: a driver that leaves hands that on.
  Deadline next_tick() const;
  // The driver gives up with this, unless the log tells a better reason first. Then ring the own bell.
  void fail(Failure failure);
  bool broken() const { return broken_; }
  bool stopped() const { return stopped_; }
  const Failure& failure() const { return failure_; }  // once broken: set before, and for good

  // One report to the coordinator, at once.
  void report(const Report& report);
  // The answer to this rank's question of that number; nullopt: it has not come.
  std::optional<std::string> take_answer(uint64_t number);
  // The same under the mutex, and rings nobody; the handle that the call will end, 0: none.
  void pass(Report&& report, Handle handle);
  // The same for a Ready of this id.
  void pass_known(uint32_t id, Contribution&& given, Handle handle);
  // Something has been passed since the last time: the leader wants to be rung. Any thread.
  bool take_news() { return news_.exchange(false); }
  // Somebody needs these handles now: no report of theirs is withheld any longer.
  void await(std::span<const Handle> handles);

  // Somebody waits: on its way to the coordinator nothing of this rank is kept back, until its next call.
  void hurry();

  // Submitters and the driver share these under this mutex.
  std::mutex& mutex() { return mutex_; }
  PendingTable& pending() { return pending_; }
  ProcessSets& sets() { return sets_; }
  Handles& handles() { return handles_; }

 private:
  struct LaneOfSet {
    Segment staging;  // outlives the lane
    std::unique_ptr<Lane> lane;
  };
  // What a bucket's end means for one call of this rank.
  struct Ending {
    Submission submission;
    Outcome outcome;
    bool launched = false;  // on a GPU: the outcome is told already
  };

  bool control();
  bool say();
  Deadline look_again() const;  // the first of all, under work_mutex_
  void apply(const Entry& entry);
  void on(const Define& define);
  void on(const Forget& forget);
  void on(const Run& run);
  void on(const Result& result);
  void on(const Fail& fail);
  void on(const Joined& joined);
  void on(const OpenSet& open);
  void on(const CloseSet& close);
  void on(const Abort& abort);
  void on(const Stop& stop);
  void on(const WhereAre& where);
  void on(const Inform& inform);
  void on(const Bundle& bundle);
  void on(const Unbundle& unbundle);

  void on(const OpenGpu& open);
  void on(const GpuKey& key);

  std::vector<Item> items_of(const Run& run, const ProcessSet& set) const;
  Bucket bucket_of(const Run& run, const ProcessSet& set, std::vector<Ending>& endings);
  void push_gpu(const Run& run, Bucket bucket, std::shared_ptr<std::vector<Ending>> endings);
  std::string label_of(const Run& run);
  void launch(Ending& ending, const std::shared_ptr<GpuEvent>& past);
  void settle(const Ending& ending, const Failure* failure);
  bool may_launch() const;
  bool step_gpu();
  bool gpu_ready() const;
  void close_gpu(SetId set, const Failure& failure);
  void abort_gpu(const Failure& failure);
  void watch(Bucket& bucket, const Run& run);
  void finish(Submission submission, Outcome outcome);
  void finish_all(std::span<Ending> endings);
  void tell_first(const Failure& failure);
  void take_failure();
  void break_down(const Failure& failure);
  void report_locked(const Report& report);
  void send_passed();
  Segment take_staging(SetId id);  // of a set that opens: made by the leader
  void open_lane(SetId id, Segment staging);

  const Topology& topology_;
  HostLinks& links_;
  MemberChannel& channel_;
  HostLeader* leader_;
  Recorder& recorder_;
  std::function<void(const Failure&)> on_failure_;
  std::set<ErrorCode> told_;   // to on_failure_
  uint64_t log_position_ = 0;  // entries read: every rank counts alike
  OpenLane make_lane_;
  std::function<void()> tell_whereabouts_;
  // Locked before mutex_: the driver holds it while it steps; others, to see whether there is work.
  mutable std::mutex work_mutex_;
  std::map<SetId, LaneOfSet> lanes_;
  std::map<SetId, Segment> gpu_staging_;
  std::atomic<RankGpu*> gpu_{nullptr};

  mutable std::mutex mutex_;
  ByteString encoded_;
  std::vector<Report> passed_;
  Bundler bundler_;
  std::atomic<int> withheld_{0};  // calls
  std::atomic<bool> hurried_{false};
  std::atomic<bool> news_{false};
  PendingTable pending_;
  ProcessSets sets_;
  mutable Handles handles_;
  std::multiset<Handle> wanted_;
  std::map<uint64_t, std::string> answers_;
  Failure failure_;
  Failure found_;                     // on this rank, by whoever called fail()
  std::atomic<bool> failing_{false};  // found_ is set; the driver has not acted on it
  std::atomic<bool> broken_{false};
  std::atomic<bool> stopped_{false};
  std::atomic<bool> deaf_{false};  // this rank has given up: it reads the log no more
};

}  // namespace farandole
