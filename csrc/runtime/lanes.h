// SPDX-License-Identifier: Apache-2.0
// The buckets that this rank has begun, in log order. Each set has a lane, and the GPU has a lane. Only the driver may
// call these functions, unless marked otherwise.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "data/backend/backend.h"
#include "lib/ipc/segment.h"
#include "runtime/calls/rank_calls.h"
#include "runtime/gpu/rank_gpu.h"

namespace farandole {

// Each lane moves its buckets one at a time. Lanes do not wait for each other.
class Lanes {
 public:
  explicit Lanes(RankCalls& calls) : calls_(calls) {}

  void open(SetId id, std::shared_ptr<Segment> staging, std::unique_ptr<Backend> backend);
  bool has(SetId id) const { return lanes_.contains(id); }
  void push(SetId id, BegunRun run);
  // Call this when no more buckets follow. Buckets under way still complete, as other members may have completed them.
  void close(SetId id);
  // Moves one block of each lane. Returns false if all lanes are waiting.
  bool step();
  bool ready() const;
  bool busy() const;  // true while a bucket is in flight, so a short spin may pay off
  Deadline look_again() const;
  const BegunRun* oldest() const;  // the oldest bucket of all lanes; nullptr if there is none
  // Makes all buckets fail. Afterwards no peer accesses this rank's buffers.
  void abort(const Failure& failure);

 private:
  struct Lane {
    std::shared_ptr<Segment> staging;  // must outlive the backend
    std::unique_ptr<Backend> backend;
    std::deque<BegunRun> runs = {};
    bool begun = false;    // the first element of `runs` has begun
    bool closing = false;  // the lane is removed after the last element of `runs` has ended
  };
  // Maximum number of bytes of staging memory that this rank's pairs keep between messages.
  static constexpr size_t kMostHeld = size_t{8} << 20;
  bool step(Lane& lane);
  void drop_closed();
  void use_pair(Lane& lane);
  void free_pairs();

  RankCalls& calls_;
  std::map<SetId, Lane> lanes_;
  std::vector<Lane*> pairs_;  // least recently used first
  bool still_read_ = false;   // a peer still reads memory that free_pairs() would free
  bool closing_ = false;      // a lane may be closing
};

// The buckets of this rank's GPU, in one lane for all sets. Decides when to launch them.
class GpuBuckets {
 public:
  explicit GpuBuckets(RankCalls& calls) : calls_(calls) {}

  // ---- Any thread
  void use(RankGpu& gpu) { gpu_ = &gpu; }
  // Call this when a user waits for these handles. With FARANDOLE_GPU_ORDER=program, buckets are launched only during
  // such a wait. A wait that started before the GPU was opened registers its handles when the caller repeats the wait.
  void want(std::span<const Handle> handles);
  void unwant(std::span<const Handle> handles);

  // ---- Driver only
  std::shared_ptr<GpuDevice> device() const;  // nullptr if no GPU is in use yet
  RankGpu& gpu() const { return *gpu_.load(); }
  // Host memory for a set whose GPU tensors travel through host memory.
  Segment& staging(SetId set) { return staging_[set]; }
  void push(BegunRun run);
  bool step();
  bool ready() const;
  Deadline look_again() const;
  // Returns the oldest bucket in progress, or nullptr. A bucket's age counts from the time when it started to move.
  const BegunRun* oldest() const;
  void close(SetId set, const Failure& failure);
  // `together` is true if all ranks have left.
  void abort(const Failure& failure, bool together);

 private:
  bool may_launch() const;
  bool send_key();
  void settle_finished();

  RankCalls& calls_;
  std::atomic<RankGpu*> gpu_{nullptr};
  std::map<SetId, Segment> staging_;
  std::deque<BegunRun> runs_;
  size_t launched_ = 0;   // number of launched buckets, which are at the front of runs_
  uint64_t settled_ = 0;  // number of buckets that were settled so far
  mutable std::mutex wanted_mutex_;
  std::multiset<Handle> wanted_;
};

}  // namespace farandole
