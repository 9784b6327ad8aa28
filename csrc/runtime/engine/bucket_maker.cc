// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/bucket_maker.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "runtime/calls/outcome.h"

namespace farandole {
namespace {

constexpr size_t kNamesOfLabel = 8;

// What the lane has to know of one call. Without a submission (this rank has joined) it takes part with
// no buffers.
Part part_of(const Item& item, const Request& request, const ProcessSet& set,
             const std::optional<Submission>& mine) {
  Part part;
  part.signature = request.signature;
  part.divisor = item.divisor;
  part.rows = rows_of(item.rows, request.signature, set.members());
  if (request.signature.traits().rooted()) {
    part.signature.root = set.member_of(request.signature.root);
  }
  if (!item.absent.empty()) {
    part.present.assign(static_cast<size_t>(set.members()), true);
    for (int32_t m : item.absent) part.present[static_cast<size_t>(m)] = false;
  }
  if (mine) {
    part.input = mine->input;
    part.output = mine->output;
    part.produced = mine->produced;
    part.signature.shape = mine->shape;
  } else if (!part.signature.shape.empty() && part.signature.shape[0] < 0) {
    part.signature.shape[0] = 0;
  }
  return part;
}

}  // namespace

// Memory for outputs whose size only negotiation knew comes from here.
BucketMaker::Made BucketMaker::make(const Run& run, const ProcessSet& set, uint64_t log_position,
                                    const std::shared_ptr<GpuDevice>& device) {
  const std::vector<Item> items = items_of(run, set);
  std::vector<std::optional<Submission>> taken;
  taken.reserve(items.size());
  {
    std::lock_guard lock(calls_.mutex);
    for (const Item& item : items) taken.push_back(calls_.pending.take(item.id, item.sequence));
  }
  Made made{{}, std::make_shared<std::vector<Ending>>()};
  made.bucket.parts.reserve(items.size());
  made.endings->reserve(items.size());
  const int64_t now = now_ns();
  for (size_t i = 0; i < items.size(); ++i) {
    const Request& request = calls_.pending.request_of(items[i].id);
    std::optional<Submission>& mine = taken[i];
    Part part = part_of(items[i], request, set, mine);
    if (mine) {
      const bool on_gpu = request.signature.device != kCpuDevice;
      Outcome outcome =
          outcome_of(part.signature, part.rows, set, *mine, on_gpu ? device : nullptr);
      recorder_.negotiated(mine->recorded, run.bucket, log_position, now);
      part.output = outcome.output;
      made.endings->push_back({std::move(*mine), std::move(outcome)});
    }
    made.bucket.parts.push_back(std::move(part));
  }
  finish_with(made.bucket, made.endings);
  watch(made.bucket, run);
  return made;
}

void BucketMaker::finish_with(Bucket& bucket, const std::shared_ptr<std::vector<Ending>>& endings) {
  bucket.done = [this, endings](const Failure* failure) {
    for (Ending& ending : *endings) {
      if (ending.launched) {
        finisher_.settle(ending, failure);
      } else if (failure) {
        ending.outcome.failure = *failure;
      }
    }
    finisher_.finish_all(*endings);
  };
}

// Tells the recorder when the bucket begins and ends.
void BucketMaker::watch(Bucket& bucket, const Run& run) {
  uint64_t bytes = 0;
  for (const Part& part : bucket.parts) bytes += part.signature.bytes();
  auto launched_ns = std::make_shared<int64_t>(0);
  bucket.begun = [this, bytes, launched_ns, set = run.set, number = run.bucket,
                  tensors = bucket.parts.size()] {
    *launched_ns = recorder_.launched(set, number, tensors, bytes);
  };
  bucket.done = [this, bytes, launched_ns, set = run.set, number = run.bucket,
                 done = std::move(bucket.done)](const Failure* failure) {
    if (!failure) recorder_.moved(set, number, bytes, *launched_ns);
    done(failure);
  };
}

// With the calls of its bundles.
std::vector<Item> BucketMaker::items_of(const Run& run, const ProcessSet& set) const {
  std::vector<Item> items = run.items;
  for (uint32_t bundle : run.bundles) {
    for (uint32_t id : calls_.reporter.ids_of(bundle)) {
      const bool average = traits_of(calls_.pending.request_of(id).signature.reduce_op).divides;
      items.push_back({id, 0, average ? set.members() : 1, {}, {}});
    }
  }
  return items;
}

std::string BucketMaker::label_of(const Run& run) {
  std::lock_guard lock(calls_.mutex);
  std::string label = "bucket " + std::to_string(run.bucket);
  const size_t shown = std::min(run.items.size(), kNamesOfLabel);
  for (size_t i = 0; i < shown; ++i) {
    const std::string& name = calls_.pending.request_of(run.items[i].id).name;
    label += (i == 0 ? ": " : ", ") + (name.empty() ? "unnamed" : name);
  }
  const size_t left = run.items.size() - shown;
  return left == 0 ? label : label + " and " + std::to_string(left) + " more";
}

}  // namespace farandole
