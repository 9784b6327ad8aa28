// SPDX-License-Identifier: Apache-2.0
// The buckets of one process set, carried out one after the other in log order. Lanes of different sets
// do not wait for each other. The driver only.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "data/plane/plane.h"

namespace farandole {

// One bucket as this rank sees it. `begun`, if any, is called before its first byte moves. `done` is called
// once: with nullptr after the last byte has moved, or with what kept it from moving.
struct Bucket {
  std::vector<Part> parts;
  std::function<void()> begun;
  std::function<void(const Failure*)> done;
};

// Whose buckets a lane carries: a set may have one of each, and their bytes must not mix.
enum class Feeds { kHost, kGpu };

class Lane {
 public:
  explicit Lane(std::unique_ptr<Plane> plane) : plane_(std::move(plane)) {}

  void push(Bucket bucket) { buckets_.push_back(std::move(bucket)); }
  // One block of the oldest bucket. False: it waits for peers, or there is none.
  bool step();
  // Whether step() would move.
  bool ready() const { return !buckets_.empty() && (!begun_ || plane_->ready()); }
  // When to step() though no bell has rung.
  Deadline look_again() const { return begun_ ? plane_->look_again() : Deadline::never(); }
  // A bucket has begun and is not finished: a short spin may pay.
  bool busy() const { return begun_; }
  // Drops everything; afterwards no peer touches our buffers.
  void abort(const Failure& failure);
  const Plane& plane() const { return *plane_; }

 private:
  std::unique_ptr<Plane> plane_;
  std::deque<Bucket> buckets_;
  bool begun_ = false;
};

}  // namespace farandole
