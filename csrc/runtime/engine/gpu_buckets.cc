// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/gpu_buckets.h"

#include <algorithm>
#include <utility>

#include "runtime/gpu/rank_gpu.h"

namespace farandole {

std::shared_ptr<GpuDevice> GpuBuckets::device() const {
  RankGpu* gpu = gpu_;
  return gpu ? gpu->device() : nullptr;
}

void GpuBuckets::push(SetId set, BucketMaker::Made made,
                      const std::function<std::string()>& label) {
  GpuBucket launched{set, std::move(made.bucket.parts), {}, {}, {}};
  if (gpu().names_ranges()) launched.label = label();
  launched.launched = [this, endings = std::move(made.endings),
                       begun =
                           std::move(made.bucket.begun)](const std::shared_ptr<GpuEvent>& past) {
    if (begun) begun();
    for (Ending& ending : *endings) finisher_.launch(ending, past);
  };
  launched.done = std::move(made.bucket.done);
  gpu().lane().push(std::move(launched));
}

void GpuBuckets::want(std::span<const Handle> handles) {
  RankGpu* gpu = gpu_;
  if (!gpu || !gpu->holds_launches()) return;
  std::lock_guard lock(calls_.mutex);
  wanted_.insert(handles.begin(), handles.end());
}

void GpuBuckets::unwant(std::span<const Handle> handles) {
  RankGpu* gpu = gpu_;
  if (!gpu || !gpu->holds_launches()) return;
  std::lock_guard lock(calls_.mutex);
  for (Handle handle : handles) {
    auto found = wanted_.find(handle);
    if (found != wanted_.end()) wanted_.erase(found);
  }
}

// In program order a bucket is launched only while the program waits for one that is not: what it launches
// itself before and after the wait then lies on the same sides of ours on every rank.
bool GpuBuckets::may_launch() const {
  if (!gpu().holds_launches()) return true;
  std::lock_guard lock(calls_.mutex);
  return std::ranges::any_of(wanted_,
                             [&](Handle handle) { return calls_.handles.unlaunched(handle); });
}

bool GpuBuckets::step() {
  RankGpu* gpu = gpu_;
  return gpu && gpu->lane().step(may_launch());
}

bool GpuBuckets::ready() const {
  RankGpu* gpu = gpu_;
  return gpu && gpu->lane().ready(may_launch());
}

void GpuBuckets::close(SetId set, const Failure& failure) {
  RankGpu* gpu = gpu_;
  if (gpu) gpu->lane().close(set, failure);
  staging_.erase(set);
}

// At a normal end what was launched comes to its end: the last results may be on their way.
void GpuBuckets::abort(const Failure& failure, bool together) {
  RankGpu* gpu = gpu_;
  if (!gpu) return;
  if (failure.code == ErrorCode::kShutdown) gpu->lane().drain();
  gpu->lane().abort(failure, together);
}

}  // namespace farandole
