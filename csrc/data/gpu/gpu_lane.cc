// SPDX-License-Identifier: Apache-2.0
#include "data/gpu/gpu_lane.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/logging.h"

namespace farandole {
namespace {

// Maximum time for which drain() waits. Work never ends if a peer has left without launching its part of the work.
constexpr std::chrono::seconds kDrainTimeout{30};

}  // namespace

std::optional<std::pair<SetId, std::string>> GpuLane::new_key() {
  for (const auto& [set, backend] : backends_) {
    if (auto key = backend->new_key()) return std::pair{set, std::move(*key)};
  }
  return std::nullopt;
}

bool GpuLane::step(bool may_launch, std::shared_ptr<GpuEvent>& past) {
  check();
  bool moved = retire();
  if (!may_launch || !next_may_go()) return moved;
  const GpuBucket& bucket = waiting_.front();
  GpuBackend& backend = *backends_.at(bucket.set);
  if (!begun_) {
    backend.begin(bucket.parts);
    begun_ = true;
  }
  if (!backend.ready() && backend.look_again().is_never()) return moved;
  const nvtx::Range range(ranges_.get(), bucket.label);
  const Progress progress = backend.step();
  if (progress == Progress::kFinished) past = launched();
  return moved || progress != Progress::kWaiting;
}

std::shared_ptr<GpuEvent> GpuLane::launched() {
  begun_ = false;
  const SetId set = waiting_.front().set;
  waiting_.pop_front();
  GpuWork work = backends_.at(set)->take_work();
  completions_.watch(work.past);
  std::shared_ptr<GpuEvent> past = work.past;
  in_flight_.push_back({set, std::move(work)});
  return past;
}

bool GpuLane::retire() {
  bool moved = false;
  while (finished_ < completions_.past()) {
    ++finished_;
    const InFlight oldest = std::move(in_flight_.front());
    in_flight_.pop_front();
    const auto backend = backends_.find(oldest.set);
    if (backend != backends_.end()) backend->second->finished();
    moved = true;
  }
  return moved;
}

void GpuLane::check() const {
  completions_.check();
  for (const auto& [set, backend] : backends_) backend->check();
}

// True if there is a next bucket and its set has a backend. A bucket may arrive before its set's backend is opened.
bool GpuLane::next_may_go() const {
  return !waiting_.empty() && backends_.contains(waiting_.front().set);
}

bool GpuLane::ready(bool may_launch) const {
  if (finished_ < completions_.past() || completions_.failed()) return true;
  for (const auto& [set, backend] : backends_) {
    if (backend->failed()) return true;
  }
  if (!may_launch || !next_may_go()) return false;
  return !begun_ || backends_.at(waiting_.front().set)->ready();
}

Deadline GpuLane::look_again(bool may_launch) const {
  if (!may_launch || !begun_) return Deadline::never();
  return backends_.at(waiting_.front().set)->look_again();
}

void GpuLane::drain() {
  const Deadline deadline = Deadline::in(kDrainTimeout);
  const auto failed = [this] {
    return completions_.failed() ||
           std::ranges::any_of(backends_, [](const auto& one) { return one.second->failed(); });
  };
  while (!in_flight_.empty() && !failed() && !deadline.expired()) {
    if (!retire()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// Waits until the launched buckets are done, because they use the communicator.
void GpuLane::close(SetId set) {
  drain();
  check();
  if (begun_ && waiting_.front().set == set) {
    GpuBackend& backend = *backends_.at(set);
    backend.abort();
    backend.synchronize();
    begun_ = false;
  }
  std::erase_if(waiting_, [set](const GpuBucket& one) { return one.set == set; });
  backends_.erase(set);
}

void GpuLane::abort(bool together) {
  const bool calm = together && in_flight_.empty() && waiting_.empty();
  if (!calm) {
    for (auto& [set, backend] : backends_) {
      attempt("aborting buckets on the GPU", [&] { backend->abort(); });
    }
    if (!backends_.empty()) backends_.begin()->second->synchronize();  // all share one stream
  }
  begun_ = false;
  waiting_.clear();
  in_flight_.clear();
  backends_.clear();
}

}  // namespace farandole
