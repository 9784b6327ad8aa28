// SPDX-License-Identifier: Apache-2.0
// The engine and this rank's GPU: how it is announced, how sets open their planes on it, and how its
// buckets end twice: launched for the waiters, done for the buffers.
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "runtime/engine/engine.h"
#include "runtime/gpu/rank_gpu.h"

namespace farandole {
namespace {

constexpr size_t kNamesOfLabel = 8;

}  // namespace

void Engine::use_gpu(RankGpu& gpu) {
  report_locked(gpu.describe(topology_.leader()));
  gpu_ = &gpu;
}

void Engine::on(const OpenGpu& open) {
  ProcessSet set;
  {
    std::lock_guard lock(mutex_);
    ProcessSet* found = sets_.find(open.set);
    if (!found || broken_) return;
    set = *found;
  }
  if (open.split) return gpu_.load()->split_nccl(open.set, set.member, set.members());
  if (set.member < 0) return;
  if (open.nccl) {
    if (set.member == 0) report(GpuKey{open.set, gpu_.load()->new_key()});
    return;
  }
  Segment& staging = gpu_staging_[open.set];
  staging = take_staging(open.set);
  gpu_.load()->open_staged(open.set, make_lane_(open.set, set, staging), set.member, set.members());
}

void Engine::on(const GpuKey& key) {
  std::lock_guard lock(mutex_);
  ProcessSet* set = sets_.find(key.set);
  if (!set || set->member < 0 || broken_) return;
  gpu_.load()->open_nccl(key.set, key.key, set->member, set->members());
}

// "bucket 7: conv.weight, conv.bias and 3 more": as a profiler shows it.
std::string Engine::label_of(const Run& run) {
  std::lock_guard lock(mutex_);
  std::string label = "bucket " + std::to_string(run.bucket);
  const size_t shown = std::min(run.items.size(), kNamesOfLabel);
  for (size_t i = 0; i < shown; ++i) {
    const std::string& name = pending_.request_of(run.items[i].id).name;
    label += (i == 0 ? ": " : ", ") + (name.empty() ? "unnamed" : name);
  }
  const size_t left = run.items.size() - shown;
  return left == 0 ? label : label + " and " + std::to_string(left) + " more";
}

void Engine::push_gpu(const Run& run, Bucket bucket, std::shared_ptr<std::vector<Ending>> endings) {
  GpuBucket launched{run.set, std::move(bucket.parts), {}, {}, {}};
  if (gpu_.load()->names_ranges()) launched.label = label_of(run);
  launched.launched = [this, endings,
                       begun = std::move(bucket.begun)](const std::shared_ptr<GpuEvent>& past) {
    if (begun) begun();
    for (Ending& ending : *endings) launch(ending, past);
  };
  launched.done = std::move(bucket.done);
  gpu_.load()->lane().push(std::move(launched));
}

void Engine::launch(Ending& ending, const std::shared_ptr<GpuEvent>& past) {
  {
    std::lock_guard lock(mutex_);
    pending_.finish(ending.submission);
  }
  ending.launched = true;
  ending.outcome.past = past;
  handles_.launch(ending.submission.handle, std::move(ending.outcome));
}

void Engine::settle(const Ending& ending, const Failure* failure) {
  if (failure) {
    recorder_.failed(ending.submission.recorded, *failure);
    tell_first(*failure);
  } else {
    recorder_.done(ending.submission.recorded, now_ns());
  }
  handles_.settle(ending.submission.handle, failure);
}

// A wait that began before there was a GPU comes here again with its next slice.
void Engine::want(std::span<const Handle> handles) {
  RankGpu* gpu = gpu_;
  if (!gpu || !gpu->holds_launches()) return;
  std::lock_guard lock(mutex_);
  wanted_.insert(handles.begin(), handles.end());
}

void Engine::unwant(std::span<const Handle> handles) {
  RankGpu* gpu = gpu_;
  if (!gpu || !gpu->holds_launches()) return;
  std::lock_guard lock(mutex_);
  for (Handle handle : handles) {
    auto found = wanted_.find(handle);
    if (found != wanted_.end()) wanted_.erase(found);
  }
}

// In program order a bucket is launched only while the program waits for one that is not: what it launches
// itself before and after the wait then lies on the same sides of ours on every rank.
bool Engine::may_launch() const {
  if (!gpu_.load()->holds_launches()) return true;
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(wanted_, [&](Handle handle) { return handles_.unlaunched(handle); });
}

bool Engine::step_gpu() {
  RankGpu* gpu = gpu_;
  return gpu && gpu->lane().step(may_launch());
}

bool Engine::gpu_ready() const {
  RankGpu* gpu = gpu_;
  return gpu && gpu->lane().ready(may_launch());
}

void Engine::close_gpu(SetId set, const Failure& failure) {
  RankGpu* gpu = gpu_;
  if (gpu) gpu->lane().close(set, failure);
  gpu_staging_.erase(set);
}

// At a normal end what was launched comes to its end: the last results may be on their way.
void Engine::abort_gpu(const Failure& failure) {
  RankGpu* gpu = gpu_;
  if (!gpu) return;
  if (failure.code == ErrorCode::kShutdown) gpu->lane().drain();
  gpu->lane().abort(failure, stopped_);
}

}  // namespace farandole
