// SPDX-License-Identifier: Apache-2.0
// The engine's side of this rank's GPU: how sets open their planes on it, and when its buckets may be launched.
#pragma once

#include <atomic>
#include <map>
#include <set>
#include <span>

#include "lib/ipc/segment.h"
#include "runtime/engine/bucket_maker.h"

namespace farandole {

class RankGpu;

class GpuBuckets {
 public:
  GpuBuckets(RankCalls& calls, Finisher& finisher) : calls_(calls), finisher_(finisher) {}

  // ---- any thread
  // This rank has tensors on a GPU from here on. Under the mutex of the calls.
  void use(RankGpu& gpu) { gpu_ = &gpu; }
  // Somebody waits for these: in program order that is when buckets may be launched. A wait that began before there
  // was a GPU comes here again with its next slice.
  void want(std::span<const Handle> handles);
  void unwant(std::span<const Handle> handles);

  // ---- the driver
  std::shared_ptr<GpuDevice> device() const;  // nullptr: none is used yet
  RankGpu& gpu() const { return *gpu_.load(); }
  // Memory of a set whose tensors on GPUs travel through the host's.
  Segment& staging(SetId set) { return staging_[set]; }
  // `label`: as a profiler shows it; asked where one listens.
  void push(SetId set, BucketMaker::Made made, const std::function<std::string()>& label);
  bool step();
  bool ready() const;
  void close(SetId set, const Failure& failure);
  // together: all ranks have left.
  void abort(const Failure& failure, bool together);

 private:
  bool may_launch() const;

  RankCalls& calls_;
  Finisher& finisher_;
  std::atomic<RankGpu*> gpu_{nullptr};
  std::map<SetId, Segment> staging_;
  std::multiset<Handle> wanted_;  // under the mutex of the calls
};

}  // namespace farandole
