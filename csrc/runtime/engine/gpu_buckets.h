// SPDX-License-Identifier: Apache-2.0
// The engine's part for this rank's GPU: opens sets' backends on it, and decides when buckets are launched.
#pragma once

#include <atomic>
#include <map>
#include <set>
#include <span>

#include "lib/ipc/segment.h"
#include "runtime/engine/buckets.h"

namespace farandole {

class RankGpu;

class GpuBuckets {
 public:
  GpuBuckets(RankCalls& calls, Finisher& finisher) : calls_(calls), finisher_(finisher) {}

  // ---- Any thread
  // This rank uses a GPU from now on. Under RankCalls::mutex.
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
  // A step of the set's backend, by the library.
  void set_up(const SetUp& step, const ProcessSet& set);
  // `label`: as a profiler shows it; asked where one listens.
  void push(SetId set, BucketMaker::Made made, const std::function<std::string()>& label);
  bool step();
  bool ready() const;
  Deadline look_again() const;
  void close(SetId set, const Failure& failure);
  // `together`: all ranks have left.
  void abort(const Failure& failure, bool together);

 private:
  bool may_launch() const;
  bool ask_for_steps();

  RankCalls& calls_;
  Finisher& finisher_;
  std::atomic<RankGpu*> gpu_{nullptr};
  std::map<SetId, Segment> staging_;
  std::multiset<Handle> wanted_;  // under the mutex of the calls
};

}  // namespace farandole
