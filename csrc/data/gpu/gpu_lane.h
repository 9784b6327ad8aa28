// SPDX-License-Identifier: Apache-2.0
// Launches the buckets of all sets on this rank's GPU, in log order: NCCL needs the same order of launches on all
// ranks. Driver only.
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
  // `ring` wakes the driver; other threads call it. `ranges`: for a profiler; nullptr: none.
  explicit GpuLane(std::function<void()> ring, std::shared_ptr<const nvtx::Api> ranges = nullptr)
      : ranges_(std::move(ranges)), completions_(std::move(ring)) {}

  void open(SetId set, std::unique_ptr<GpuBackend> backend) { backends_[set] = std::move(backend); }
  // See GpuBackend.
  std::optional<std::pair<SetId, std::string>> new_key();
  void connect(SetId set, const std::string& key) { backends_.at(set)->connect(key); }
  // Ends the set's backend, and drops buckets of the set that are not launched.
  void close(SetId set);
  void push(GpuBucket bucket) { waiting_.push_back(std::move(bucket)); }

  // Retires buckets that are done; then, if `may_launch`, launches at most one bucket, and sets `past` to the event
  // that fires when that bucket is done. False: no progress. Throws errors of a backend or the device.
  bool step(bool may_launch, std::shared_ptr<GpuEvent>& past);
  // Number of buckets that are done, in launch order. Nothing uses a done bucket's buffers.
  uint64_t finished() const { return finished_; }
  bool begun() const { return begun_; }  // the next bucket to launch has started
  bool ready(bool may_launch) const;
  Deadline look_again(bool may_launch) const;  // see Backend
  // Blocks until launched work is done or has failed, for at most 30 s.
  void drain();
  // Drops all buckets. Afterwards no work in the stream writes to their buffers. `together`: all ranks call it now, so
  // idle communicators are closed instead of aborted.
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
  bool begun_ = false;  // see begun()
  std::deque<InFlight> in_flight_;
  uint64_t finished_ = 0;
  GpuCompletions completions_;  // for launched buckets
};

}  // namespace farandole
