// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/buckets.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "runtime/calls/outcome.h"

namespace farandole {
namespace {

constexpr size_t kNamesOfLabel = 8;

// Describes one call to the lane. Without a submission (this rank has joined) the part has no buffers.
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

// Allocates the outputs whose size only negotiation could tell.
BucketMaker::Made BucketMaker::make(const Run& run, const ProcessSet& set, uint64_t log_position,
                                    const std::shared_ptr<GpuDevice>& device) {
  const std::vector<Item> items = items_of(run, set.members());
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
  follow(made, run, set.member == 0);
  return made;
}

// What happens when the bucket begins and ends. The set's `lowest` member reports that it has ended.
void BucketMaker::follow(Made& made, const Run& run, bool lowest) {
  uint64_t bytes = 0;
  for (const Part& part : made.bucket.parts) bytes += part.signature.bytes();
  auto launched_ns = std::make_shared<int64_t>(0);
  made.bucket.begun = [this, bytes, launched_ns, set = run.set, number = run.bucket,
                       tensors = made.bucket.parts.size()] {
    *launched_ns = recorder_.launched(set, number, tensors, bytes);
  };
  made.bucket.done = [this, bytes, launched_ns, done = Done{run.set, run.bucket, run.gpu}, lowest,
                      endings = made.endings](const Failure* failure) {
    if (!failure) recorder_.moved(done.set, done.bucket, bytes, *launched_ns);
    finisher_.finish_all(*endings, failure);
    if (lowest && !failure) calls_.report(done);
  };
}

// All of the run's calls.
std::vector<Item> BucketMaker::items_of(const Run& run, int members) const {
  std::vector<Item> items = run.items;
  items.reserve(items.size() + run.plain.size());
  run.plain.for_each([&](uint32_t id) {
    items.push_back(plain_item(id, calls_.pending.request_of(id).signature, members));
  });
  return items;
}

std::string BucketMaker::label_of(const Run& run) {
  std::lock_guard lock(calls_.mutex);
  std::string label = "bucket " + std::to_string(run.bucket);
  const std::vector<Item> items = items_of(run, 1);
  const size_t shown = std::min(items.size(), kNamesOfLabel);
  for (size_t i = 0; i < shown; ++i) {
    const std::string& name = calls_.pending.request_of(items[i].id).name;
    label += (i == 0 ? ": " : ", ") + (name.empty() ? "unnamed" : name);
  }
  const size_t left = items.size() - shown;
  return left == 0 ? label : label + " and " + std::to_string(left) + " more";
}

void Finisher::finish(Submission submission, Outcome outcome) {
  Ending ending{std::move(submission), std::move(outcome)};
  finish_all({&ending, 1});
}

// Under RankCalls::mutex.
void Finisher::end_name(const Submission& submission) {
  if (auto refusal = calls_.pending.finish(submission)) {
    calls_.reporter.send(std::move(*refusal));
    calls_.tell_join(submission.recorded.set);
  }
}

// Names are freed before handles complete, so that waiters can reuse them.
void Finisher::finish_all(std::span<Ending> endings, const Failure* failure) {
  for (Ending& ending : endings) {
    if (ending.launched) {
      settle(ending, failure);
    } else if (failure) {
      ending.outcome.failure = *failure;
    }
  }
  {
    std::lock_guard lock(calls_.mutex);
    for (const Ending& ending : endings) {
      if (!ending.launched) end_name(ending.submission);
    }
  }
  const int64_t now = now_ns();
  for (const Ending& ending : endings) {
    if (ending.launched) continue;
    const RecordedCall& call = ending.submission.recorded;
    if (ending.outcome.failure) {
      recorder_.failed(call, ending.outcome.failure);
      tell_first(ending.outcome.failure);
    } else {
      recorder_.done(call, now);
    }
  }
  calls_.handles.finish_all([&](auto&& end) {
    for (Ending& ending : endings) {
      if (!ending.launched) end(ending.submission.handle, std::move(ending.outcome));
    }
  });
}

void Finisher::launch(Ending& ending, const std::shared_ptr<GpuEvent>& past) {
  {
    std::lock_guard lock(calls_.mutex);
    end_name(ending.submission);
  }
  ending.launched = true;
  ending.outcome.past = past;
  calls_.handles.launch(ending.submission.handle, std::move(ending.outcome));
}

void Finisher::settle(const Ending& ending, const Failure* failure) {
  if (failure) {
    recorder_.failed(ending.submission.recorded, *failure);
    tell_first(*failure);
  } else {
    recorder_.done(ending.submission.recorded, now_ns());
  }
  calls_.handles.settle(ending.submission.handle, failure);
}

void Finisher::tell_first(const Failure& failure) {
  const bool ends_well = failure.code == ErrorCode::kShutdown;
  if (!ends_well && told_.insert(failure.code).second) on_failure_(failure);
}

}  // namespace farandole
