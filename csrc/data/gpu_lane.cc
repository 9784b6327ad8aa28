// SPDX-License-Identifier: Apache-2.0
#include "data/gpu_lane.h"

#include <algorithm>
#include <utility>

namespace farandole {

bool GpuLane::step(bool may_launch) {
  check();
  bool moved = retire();
  if (waiting_.empty() || !may_launch) return moved;
  GpuPlane& plane = *planes_.at(waiting_.front().set);
  if (!begun_) {
    plane.begin(waiting_.front().parts);
    begun_ = true;
  }
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

bool GpuLane::ready(bool may_launch) const {
  if (retired_ < state_->past.load() || state_->failed) return true;
  for (const auto& [set, plane] : planes_) {
    if (plane->failed()) return true;
  }
  if (waiting_.empty() || !may_launch) return false;
  return !begun_ || planes_.at(waiting_.front().set)->ready();
}

// Launched buckets of the set run to their end: their communicator goes last.
void GpuLane::close(SetId set, const Failure& failure) {
  auto plane = planes_.find(set);
  if (plane == planes_.end()) return;
  std::deque<GpuBucket> rest;
  for (GpuBucket& bucket : std::exchange(waiting_, {})) {
    if (bucket.set == set) {
      if (rest.empty()) begun_ = false;  // it may have been the first
      bucket.done(&failure);
    } else {
      rest.push_back(std::move(bucket));
    }
  }
  waiting_ = std::move(rest);
  for (const InFlight& one : in_flight_) {
    if (one.bucket.set == set) one.work.past->wait();
  }
  planes_.erase(plane);
}

void GpuLane::abort(const Failure& failure) {
  for (auto& [set, plane] : planes_) plane->abort();
  begun_ = false;
  for (GpuBucket& bucket : std::exchange(waiting_, {})) bucket.done(&failure);
  for (InFlight& one : std::exchange(in_flight_, {})) one.bucket.done(&failure);
  planes_.clear();
}

}  // namespace farandole
