// SPDX-License-Identifier: Apache-2.0
// See gpu_lane.h. Used by runtime/engine/gpu_buckets; the driver only, but for what the completion thread counts.
#include "data/gpu/gpu_lane.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace farandole {
namespace {

// What was launched here, but never on some peer that has left, does not end.
constexpr std::chrono::seconds kDrainTimeout{30};

}  // namespace

std::optional<std::pair<SetId, std::string>> GpuLane::new_key() {
  for (const auto& [set, backend] : backends_) {
    if (auto key = backend->new_key()) return std::pair{set, std::move(*key)};
  }
  return std::nullopt;
}

bool GpuLane::step(bool may_launch) {
  if (aborted_) return false;
  check();
  bool moved = retire();
  if (!may_launch || !next_may_go()) return moved;
  const GpuBucket& bucket = waiting_.front();
  GpuBackend& backend = *backends_.at(bucket.set);
  if (!begun_) {
    backend.begin(bucket.parts);
    begun_ = true;
  }
  if (!backend.ready()) return moved;
  const nvtx::Range range(ranges_.get(), bucket.label);
  const Progress progress = backend.step();
  if (progress == Progress::kFinished) launched();
  return moved || progress != Progress::kWaiting;
}

void GpuLane::launched() {
  begun_ = false;
  GpuBucket bucket = std::move(waiting_.front());
  waiting_.pop_front();
  GpuWork work = backends_.at(bucket.set)->take_work();
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
    if (auto backend = backends_.find(oldest.bucket.set); backend != backends_.end()) {
      backend->second->finished();
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
  for (const auto& [set, backend] : backends_) backend->check();
}

// A bucket may come before the key with which its set's communicator is opened.
bool GpuLane::next_may_go() const {
  return !waiting_.empty() && backends_.contains(waiting_.front().set);
}

bool GpuLane::ready(bool may_launch) const {
  if (aborted_) return false;
  if (retired_ < state_->past.load() || state_->failed) return true;
  for (const auto& [set, backend] : backends_) {
    if (backend->failed()) return true;
  }
  if (!may_launch || !next_may_go()) return false;
  return !begun_ || backends_.at(waiting_.front().set)->ready();
}

void GpuLane::drain() {
  const Deadline deadline = Deadline::in(kDrainTimeout);
  const auto failed = [this] {
    return state_->failed ||
           std::ranges::any_of(backends_, [](const auto& one) { return one.second->failed(); });
  };
  while (!in_flight_.empty() && !failed() && !deadline.expired()) {
    if (!retire()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// Launched buckets run to their end first: the set's communicator goes last.
void GpuLane::close(SetId set, const Failure& failure) {
  drain();
  check();
  if (begun_ && waiting_.front().set == set) {
    GpuBackend& backend = *backends_.at(set);
    backend.abort();
    backend.synchronize();
    begun_ = false;
  }
  std::vector<GpuBucket> left;
  for (GpuBucket& one : std::exchange(waiting_, {})) {
    if (one.set == set) {
      left.push_back(std::move(one));
    } else {
      waiting_.push_back(std::move(one));
    }
  }
  backends_.erase(set);
  for (const GpuBucket& bucket : left) bucket.done(&failure);
}

void GpuLane::abort(const Failure& failure, bool together) {
  aborted_ = true;
  const bool calm = together && in_flight_.empty() && waiting_.empty();
  if (!calm) {
    for (auto& [set, backend] : backends_) backend->abort();
    if (!backends_.empty()) backends_.begin()->second->synchronize();  // one stream for all
  }
  begun_ = false;
  for (GpuBucket& one : std::exchange(waiting_, {})) one.done(&failure);
  for (InFlight& one : std::exchange(in_flight_, {})) one.bucket.done(&failure);
  backends_.clear();
}

}  // namespace farandole
