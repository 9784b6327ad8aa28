// SPDX-License-Identifier: Apache-2.0
// The queue of a process set's buckets, carried out one at a time in log order. Lanes of different sets don't
// wait for each other. The driver only.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "data/backend/backend.h"

namespace farandole {

// One bucket as this rank sees it. `begun`, if set, is called before its first byte moves. `done` is called
// once: with nullptr after the last byte has moved, or with the failure.
struct Bucket {
  std::vector<Part> parts;
  std::function<void()> begun;
  std::function<void(const Failure*)> done;
};

// Which buckets a lane carries. A set may have a lane of each kind, and their messages must not mix.
enum class Feeds { kHost, kGpu };

class Lane {
 public:
  explicit Lane(std::unique_ptr<Backend> backend) : backend_(std::move(backend)) {}

  void push(Bucket bucket) { buckets_.push_back(std::move(bucket)); }
  // Moves one block of the oldest bucket. False: it waits for peers, or there is no bucket.
  bool step();
  // Whether step() would make progress.
  bool ready() const { return !buckets_.empty() && (!begun_ || backend_->ready()); }
  // When to call step() without a wake-up.
  Deadline look_again() const { return begun_ ? backend_->look_again() : Deadline::never(); }
  // A bucket is in flight, so a short spin may pay off.
  bool busy() const { return begun_; }
  // Fails all buckets; afterwards no peer accesses our buffers.
  void abort(const Failure& failure);

 private:
  std::unique_ptr<Backend> backend_;
  std::deque<Bucket> buckets_;
  bool begun_ = false;
};

}  // namespace farandole
