// SPDX-License-Identifier: Apache-2.0
#include "data/gpu_lane.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace farandole {
namespace {

// What was launched here, but never on some peer that has left, does not end.
constexpr std::chrono::seconds kDrainTimeout{30};

}  // namespace

bool GpuLane::step(bool may_launch) {
  if (aborted_) return false;
  check();
  bool moved = retire();
  if (!may_launch || !next_is_open()) return moved;
  GpuPlane& plane = *planes_.at(waiting_.front().set);
  if (!begun_) {
    plane.begin(waiting_.front().parts);
    begun_ = true;
  }
  if (!plane.ready()) return moved;
  const nvtx::Range range(ranges_.get(), waiting_.front().label);
  const Progress progress = plane.step();
  if (progress == Progress::kFinished) launched();
  return moved || progress != Progress::kWaiting;
}

void GpuLane::launched() {
  begun_ = false;
  GpuBucket bucket = std::move(waiting_.front());
  waiting_.pop_front();
  GpuWork work = planes_.at(bucket.set)->take_work();
  completions_.watch(work.past, [state = state_](Failure failure) {
    if (failure) {
      std::lock_guard lock(state->mutex);
      state->failure = std::move(failure);
      state->failed = true;
    } else {
      state->past.fetch_add(1);
    }
    state->ring();
  });
  if (bucket.launched) bucket.launched(work.past);
  in_flight_.push_back({std::move(bucket), std::move(work)});
}

bool GpuLane::retire() {
  bool moved = false;
  while (retired_ < state_->past.load()) {
    ++retired_;
    InFlight oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    if (auto plane = planes_.find(oldest.bucket.set); plane != planes_.end()) {
      plane->second->finished();
    }
    oldest.bucket.done(nullptr);
    moved = true;
  }
  return moved;
}

void GpuLane::check() const {
  if (state_->failed) {
    std::lock_guard lock(state_->mutex);
    throw Error(state_->failure.code, state_->failure.text);
  }
  for (const auto& [set, plane] : planes_) plane->check();
}

// A bucket may come before the key with which its set's communicator is opened.
bool GpuLane::next_is_open() const {
  return !waiting_.empty() && planes_.contains(waiting_.front().set);
}

bool GpuLane::ready(bool may_launch) const {
  if (aborted_) return false;
  if (retired_ < state_->past.load() || state_->failed) return true;
  for (const auto& [set, plane] : planes_) {
    if (plane->failed()) return true;
  }
  if (!may_launch || !next_is_open()) return false;
  return !begun_ || planes_.at(waiting_.front().set)->ready();
}

void GpuLane::drain() {
  const Deadline deadline = Deadline::in(kDrainTimeout);
  const auto failed = [this] {
    return state_->failed ||
           std::ranges::any_of(planes_, [](const auto& one) { return one.second->failed(); });
  };
  while (!in_flight_.empty() && !failed() && !deadline.expired()) {
    if (!retire()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// Launched buckets run to their end first: the set's communicator goes last.
void GpuLane::close(SetId set, const Failure& failure) {
  drain();
  check();
  if (!waiting_.empty() && waiting_.front().set == set) begun_ = false;
  std::deque<GpuBucket> rest;
  for (GpuBucket& bucket : std::exchange(waiting_, {})) {
    if (bucket.set == set) {
      bucket.done(&failure);
    } else {
      rest.push_back(std::move(bucket));
    }
  }
  waiting_ = std::move(rest);
  planes_.erase(set);
}

void GpuLane::abort(const Failure& failure, bool together) {
  aborted_ = true;
  const bool calm = together && in_flight_.empty() && waiting_.empty();
  if (!calm) {
    for (auto& [set, plane] : planes_) plane->abort();
  }
  begun_ = false;
  for (GpuBucket& bucket : std::exchange(waiting_, {})) bucket.done(&failure);
  for (InFlight& one : std::exchange(in_flight_, {})) one.bucket.done(&failure);
  planes_.clear();
}

}  // namespace farandole
