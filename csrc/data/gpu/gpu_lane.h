// SPDX-License-Identifier: Apache-2.0
// Launches the buckets of all sets on this rank's GPU. The buckets are launched in log order, because NCCL needs the
// same order of launches on all ranks. Used only by the driver.
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
  std::span<const Part> parts;  // must stay valid until the bucket is done or dropped
  std::string label = {};       // for a profiler's timeline
};

class GpuLane {
 public:
  // `ring` wakes the driver and is called from other threads. `ranges` is nullptr if there is no profiler.
  explicit GpuLane(std::function<void()> ring, std::shared_ptr<const nvtx::Api> ranges = nullptr)
      : ranges_(std::move(ranges)), completions_(std::move(ring)) {}

  void open(SetId set, std::unique_ptr<GpuBackend> backend) { backends_[set] = std::move(backend); }
  // See GpuBackend.
  std::optional<std::pair<SetId, std::string>> new_key();
  void connect(SetId set, const std::string& key) { backends_.at(set)->connect(key); }
  // Destroys the set's backend and drops the set's buckets that are not launched.
  void close(SetId set);
  void push(GpuBucket bucket) { waiting_.push_back(std::move(bucket)); }

  // Retires buckets that are done. If `may_launch` is true, then launches at most one bucket and sets `past` to the
  // event that fires when that bucket is done. Returns false if there was no progress. Throws an error if a backend or
  // the device has failed.
  bool step(bool may_launch, std::shared_ptr<GpuEvent>& past);
  // Returns the number of buckets that are done, in launch order. Nothing uses the buffers of a bucket that is done.
  uint64_t finished() const { return finished_; }
  bool begun() const { return begun_; }  // true if the next bucket to launch has started
  bool ready(bool may_launch) const;
  Deadline look_again(bool may_launch) const;  // see Backend
  // Blocks until launched work is done or has failed, for at most 30 s.
  void drain();
  // Drops all buckets. Afterwards no work in the stream writes to their buffers. If `together` is true, all ranks call
  // this now, so idle communicators are closed instead of aborted.
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
  bool begun_ = false;
  std::deque<InFlight> in_flight_;
  uint64_t finished_ = 0;
  GpuCompletions completions_;  // waits for launched buckets
};

}  // namespace farandole
