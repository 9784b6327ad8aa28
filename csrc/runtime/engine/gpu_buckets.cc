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

void GpuBuckets::set_up(const SetUp& step, const ProcessSet& set) {
  if (RankGpu* gpu = gpu_) gpu->set_up(step, set.member, set.members());
}

bool GpuBuckets::ask_for_steps() {
  gpu().windows().drop_past();
  const auto wanted = gpu().lane().wants_step();
  if (wanted) calls_.report(SetUp{wanted->first, wanted->second.name, wanted->second.bytes});
  return wanted.has_value();
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

// In program order, launches only while the program waits for a bucket not yet launched. So NCCL work that
// the program launches before or after that wait is in the same order relative to ours on all ranks.
bool GpuBuckets::may_launch() const {
  if (!gpu().holds_launches()) return true;
  std::lock_guard lock(calls_.mutex);
  return std::ranges::any_of(wanted_,
                             [&](Handle handle) { return calls_.handles.unlaunched(handle); });
}

bool GpuBuckets::step() {
  RankGpu* gpu = gpu_;
  return gpu && (ask_for_steps() || gpu->lane().step(may_launch()));
}

bool GpuBuckets::ready() const {
  RankGpu* gpu = gpu_;
  return gpu && gpu->lane().ready(may_launch());
}

Deadline GpuBuckets::look_again() const {
  RankGpu* gpu = gpu_;
  return gpu ? gpu->lane().look_again(may_launch()) : Deadline::never();
}

void GpuBuckets::close(SetId set, const Failure& failure) {
  RankGpu* gpu = gpu_;
  if (gpu) gpu->lane().close(set, failure);
  staging_.erase(set);
}

// On normal shutdown, waits for launched buckets, whose results may still be on their way.
void GpuBuckets::abort(const Failure& failure, bool together) {
  RankGpu* gpu = gpu_;
  if (!gpu) return;
  if (failure.code == ErrorCode::kShutdown) gpu->lane().drain();
  gpu->lane().abort(failure, together);
}

}  // namespace farandole
