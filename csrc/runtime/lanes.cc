// SPDX-License-Identifier: Apache-2.0
#include "runtime/lanes.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "base/logging.h"

namespace farandole {

void Lanes::open(SetId id, std::shared_ptr<Segment> staging, std::unique_ptr<Backend> backend) {
  lanes_.emplace(id, Lane{std::move(staging), std::move(backend)});
}

void Lanes::push(SetId id, BegunRun run) {
  Lane& lane = lanes_.at(id);
  if (is_pair(id)) use_pair(lane);
  lane.runs.push_back(std::move(run));
}

void Lanes::use_pair(Lane& lane) {
  if (!pairs_.empty() && pairs_.back() == &lane) return;
  std::erase(pairs_, &lane);
  pairs_.push_back(&lane);
  free_pairs();
}

// Frees memory of the least recently used pairs. Memory that peers still read is freed in a later step.
void Lanes::free_pairs() {
  size_t held = 0;
  still_read_ = false;
  for (Lane* one : std::views::reverse(pairs_)) {
    if (one != pairs_.back() && held + one->backend->held() > kMostHeld) {
      if (one->runs.empty()) one->backend->rest();
      still_read_ |= one->backend->held() > 0;
    }
    held += one->backend->held();
  }
}

bool Lanes::step() {
  bool moved = false;
  for (auto& [id, lane] : lanes_) moved |= step(lane);
  if (still_read_) free_pairs();
  if (closing_) drop_closed();
  return moved;
}

bool Lanes::step(Lane& lane) {
  if (lane.runs.empty()) return false;
  if (!lane.begun) {
    calls_.launched(lane.runs.front());
    lane.backend->begin(lane.runs.front().parts);
    lane.begun = true;
  }
  const Progress progress = lane.backend->step();
  if (progress == Progress::kFinished) {
    lane.begun = false;
    BegunRun finished = std::move(lane.runs.front());
    lane.runs.pop_front();
    calls_.settle(finished, nullptr);
  }
  return progress != Progress::kWaiting;
}

bool Lanes::ready() const {
  return std::ranges::any_of(lanes_, [](const auto& one) {
    const Lane& lane = one.second;
    return !lane.runs.empty() && (!lane.begun || lane.backend->ready());
  });
}

bool Lanes::busy() const {
  return std::ranges::any_of(lanes_, [](const auto& one) { return one.second.begun; });
}

Deadline Lanes::look_again() const {
  Deadline soonest = Deadline::never();
  for (const auto& [id, lane] : lanes_) {
    if (lane.begun) soonest = std::min(soonest, lane.backend->look_again());
  }
  return soonest;
}

const BegunRun* Lanes::oldest() const {
  const BegunRun* oldest = nullptr;
  for (const auto& [id, lane] : lanes_) {
    const BegunRun* first = lane.runs.empty() ? nullptr : &lane.runs.front();
    if (first && (!oldest || first->begun_ns < oldest->begun_ns)) oldest = first;
  }
  return oldest;
}

void Lanes::abort(const Failure& failure) {
  for (auto& [id, lane] : lanes_) {
    attempt("giving up a lane", [&] { lane.backend->abort(); });
    lane.begun = false;
    for (BegunRun& run : std::exchange(lane.runs, {})) calls_.settle(run, &failure);
  }
}

void Lanes::close(SetId id) {
  lanes_.at(id).closing = true;
  drop_closed();
}

void Lanes::drop_closed() {
  std::erase_if(lanes_,
                [](const auto& one) { return one.second.closing && one.second.runs.empty(); });
  closing_ = std::ranges::any_of(lanes_, [](const auto& one) { return one.second.closing; });
}

// ---- GpuBuckets

std::shared_ptr<GpuDevice> GpuBuckets::device() const {
  RankGpu* gpu = gpu_;
  return gpu ? gpu->device() : nullptr;
}

void GpuBuckets::push(BegunRun run) {
  runs_.push_back(std::move(run));
  gpu().lane().push({runs_.back().done.set, runs_.back().parts, runs_.back().label});
}

bool GpuBuckets::send_key() {
  const auto key = gpu().lane().new_key();
  if (key) calls_.report(OpenGpu{key->first, key->second});
  return key.has_value();
}

void GpuBuckets::want(std::span<const Handle> handles) {
  RankGpu* gpu = gpu_;
  if (!gpu || !gpu->holds_launches()) return;
  std::lock_guard lock(wanted_mutex_);
  wanted_.insert(handles.begin(), handles.end());
}

void GpuBuckets::unwant(std::span<const Handle> handles) {
  RankGpu* gpu = gpu_;
  if (!gpu || !gpu->holds_launches()) return;
  std::lock_guard lock(wanted_mutex_);
  for (Handle handle : handles) {
    auto found = wanted_.find(handle);
    if (found != wanted_.end()) wanted_.erase(found);
  }
}

// With FARANDOLE_GPU_ORDER=program, launches buckets only while the program waits for a bucket that is not launched
// yet. As a result, farandole's NCCL work has the same place among the program's other NCCL work on all ranks.
bool GpuBuckets::may_launch() const {
  if (!gpu().holds_launches()) return true;
  std::lock_guard lock(wanted_mutex_);
  return std::ranges::any_of(wanted_,
                             [&](Handle handle) { return calls_.handles.unlaunched(handle); });
}

bool GpuBuckets::step() {
  RankGpu* gpu = gpu_;
  if (!gpu) return false;
  if (send_key()) return true;
  std::shared_ptr<GpuEvent> past;
  const bool begun = gpu->lane().begun();
  const bool moved = gpu->lane().step(may_launch(), past);
  settle_finished();
  if (past) {
    calls_.launch(runs_[launched_++], past);
  } else if (!begun && gpu->lane().begun()) {
    runs_[launched_].begun_ns = now_ns();  // until now the bucket may have waited for the program
  }
  return moved;
}

void GpuBuckets::settle_finished() {
  for (; settled_ < gpu().lane().finished(); ++settled_, --launched_) {
    calls_.settle(runs_.front(), nullptr);
    runs_.pop_front();
  }
}

bool GpuBuckets::ready() const {
  RankGpu* gpu = gpu_;
  return gpu && gpu->lane().ready(may_launch());
}

Deadline GpuBuckets::look_again() const {
  RankGpu* gpu = gpu_;
  return gpu ? gpu->lane().look_again(may_launch()) : Deadline::never();
}

const BegunRun* GpuBuckets::oldest() const {
  const bool moves = launched_ > 0 || (!runs_.empty() && gpu().lane().begun() && may_launch());
  return moves ? &runs_.front() : nullptr;
}

void GpuBuckets::close(SetId set, const Failure& failure) {
  RankGpu* gpu = gpu_;
  if (gpu) {
    gpu->lane().close(set);
    settle_finished();
    const auto waiting = runs_.begin() + static_cast<std::ptrdiff_t>(launched_);
    const auto left = std::stable_partition(
        waiting, runs_.end(), [&](const BegunRun& run) { return run.done.set != set; });
    for (auto run = left; run != runs_.end(); ++run) calls_.settle(*run, &failure);
    runs_.erase(left, runs_.end());
  }
  staging_.erase(set);
}

// At a normal shutdown, first waits for the buckets that are launched, because their results are still valid.
void GpuBuckets::abort(const Failure& failure, bool together) {
  RankGpu* gpu = gpu_;
  if (!gpu) return;
  attempt("the last buckets on the GPU", [&] {
    if (failure.code == ErrorCode::kShutdown) gpu->lane().drain();
    settle_finished();
  });
  gpu->lane().abort(together);
  for (BegunRun& run : std::exchange(runs_, {})) calls_.settle(run, &failure);
  launched_ = 0;
}

}  // namespace farandole
