// SPDX-License-Identifier: Apache-2.0
// The buckets of all process sets on this rank's GPU, launched one after the other in log order: NCCL
// needs one order over all communicators of a device. The driver only.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "data/backend/backend.h"
#include "data/gpu/gpu_backend.h"
#include "data/gpu/gpu_completions.h"
#include "lib/gpu/nvtx.h"

namespace farandole {

struct GpuBucket {
  SetId set = kWorldSet;
  std::span<const Part> parts;  // until it has finished, or was given up
  std::string label = {};       // on a profiler's timeline
};

class GpuLane {
 public:
  // `ring`: wakes the driver; from other threads. `ranges`: nullptr: no profiler listens.
  explicit GpuLane(std::function<void()> ring, std::shared_ptr<const nvtx::Api> ranges = nullptr)
      : ranges_(std::move(ranges)), completions_(std::move(ring)) {}

  // Buckets of this set may come from here on.
  void open(SetId set, std::unique_ptr<GpuBackend> backend) { backends_[set] = std::move(backend); }
  // As GpuBackend's.
  std::optional<std::pair<SetId, std::string>> new_key();
  void connect(SetId set, const std::string& key) { backends_.at(set)->connect(key); }
  // Ends the set's backend, and gives up its buckets that were not launched.
  void close(SetId set);
  void push(GpuBucket bucket) { waiting_.push_back(std::move(bucket)); }

  // Finishes what the GPU is past, then launches one bucket at most; what comes after `past` in a stream sees its
  // results. False: there was nothing to do. Throws what a backend or the device found. `may_launch`: false holds new
  // buckets back (program order).
  bool step(bool may_launch, std::shared_ptr<GpuEvent>& past);
  // Buckets ever that are done, in the order of their launch: nobody reads or writes their buffers again.
  uint64_t finished() const { return finished_; }
  bool ready(bool may_launch) const;
  Deadline look_again(bool may_launch) const;  // as Backend's
  // Blocks until what was launched is done, or has failed, or for half a minute.
  void drain();
  // Gives up all buckets; afterwards nothing of ours writes to their buffers. `together`: all ranks do so now, so that
  // communicators with nothing under way are closed, not aborted.
  void abort(bool together);

 private:
  struct InFlight {
    SetId set;
    GpuWork work;
  };
  bool retire();
  bool next_may_go() const;
  std::shared_ptr<GpuEvent> launched();
  void check() const;

  std::shared_ptr<const nvtx::Api> ranges_;
  std::map<SetId, std::unique_ptr<GpuBackend>> backends_;
  std::deque<GpuBucket> waiting_;
  bool begun_ = false;  // the first of them
  std::deque<InFlight> in_flight_;
  uint64_t finished_ = 0;
  GpuCompletions completions_;  // of launched buckets
};

}  // namespace farandole
