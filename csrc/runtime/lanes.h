// SPDX-License-Identifier: Apache-2.0
// The buckets that this rank has begun, in log order: in a lane for each process set, and one for its GPU. They settle
// what has finished. The driver only, unless marked.
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

// Each carries out its buckets one at a time; they don't wait for each other.
class Lanes {
 public:
  explicit Lanes(RankCalls& calls) : calls_(calls) {}

  // The set has this rank as a member.
  void open(SetId id, std::shared_ptr<Segment> staging, std::unique_ptr<Backend> backend);
  bool has(SetId id) const { return lanes_.contains(id); }
  void push(SetId id, BegunRun run);
  // No buckets follow. Those under way still end, because they do so on some members already.
  void close(SetId id);
  // Moves one block of each lane. False: all wait.
  bool step();
  bool ready() const;
  bool busy() const;  // a bucket is in flight, so a short spin may pay off
  Deadline look_again() const;
  // Fails all buckets; afterwards no peer accesses our buffers.
  void abort(const Failure& failure);

 private:
  struct Lane {
    std::shared_ptr<Segment> staging;  // must outlive the backend
    std::unique_ptr<Backend> backend;
    std::deque<BegunRun> runs = {};
    bool begun = false;    // the first of them
    bool closing = false;  // goes with the last of them
  };
  // Between messages, this rank's pairs keep so much memory together.
  static constexpr size_t kMostHeld = size_t{8} << 20;
  bool step(Lane& lane);
  void drop_closed();
  void use_pair(Lane& lane);
  void free_pairs();

  RankCalls& calls_;
  std::map<SetId, Lane> lanes_;
  std::vector<Lane*> pairs_;  // the least recently used first
  bool still_read_ = false;   // free_pairs() could not free one of them yet
  bool closing_ = false;      // a lane may be
};

// This rank's GPU has one lane for all sets, and decides when buckets are launched.
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
  void push(BegunRun run);
  bool step();
  bool ready() const;
  Deadline look_again() const;
  void close(SetId set, const Failure& failure);
  // `together`: all ranks have left.
  void abort(const Failure& failure, bool together);

 private:
  bool may_launch() const;
  bool send_key();
  void settle_finished();

  RankCalls& calls_;
  std::atomic<RankGpu*> gpu_{nullptr};
  std::map<SetId, Segment> staging_;
  std::deque<BegunRun> runs_;
  size_t launched_ = 0;   // at the front of them
  uint64_t settled_ = 0;  // ever
  mutable std::mutex wanted_mutex_;
  std::multiset<Handle> wanted_;
};

}  // namespace farandole
