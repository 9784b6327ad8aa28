// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/engine.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "runtime/calls/outcome.h"
#include "runtime/gpu/rank_gpu.h"

namespace farandole {
namespace {

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

Engine::Engine(Setup setup)
    : topology_(setup.topology),
      links_(setup.links),
      channel_(setup.channel),
      leader_(setup.leader),
      recorder_(setup.recorder),
      on_failure_(std::move(setup.on_failure)),
      make_lane_(std::move(setup.open_lane)),
      tell_whereabouts_(std::move(setup.tell_whereabouts)),
      sets_(setup.topology.rank) {
  std::vector<Rank> world(static_cast<size_t>(topology_.size));
  std::iota(world.begin(), world.end(), 0);
  recorder_.open_set(kWorldSet, world);
  sets_.open(kWorldSet, std::move(world));
  open_lane(kWorldSet, std::move(setup.world_staging));
}

bool Engine::step() {
  std::lock_guard lock(work_mutex_);
  bool moved = control();
  for (auto& [id, lane] : lanes_) moved |= lane.lane->step();
  moved |= step_gpu();
  return moved;
}

bool Engine::control_step() {
  std::lock_guard lock(work_mutex_);
  return control();
}

bool Engine::say_last() {
  std::lock_guard lock(work_mutex_);
  return !stopped_ && say();
}

// Own reports that found the ring full, and what the leader passes on.
bool Engine::say() {
  bool moved = false;
  if (channel_.can_flush()) {
    std::lock_guard lock(mutex_);
    channel_.flush();
    channel_.ring_leader();
    moved = true;
  }
  if (leader_) moved |= leader_->step();
  return moved;
}

bool Engine::control() {
  bool moved = say();
  for (bool first = true; !deaf_; first = false) {
    ByteView message = channel_.next_entry();
    if (message.empty()) break;
    if (first) recorder_.cycle();
    moved = true;
    apply(decode_entry(message));
  }
  if (!failing_.exchange(false)) return moved;
  take_failure();
  return true;
}

bool Engine::has_work() const {
  std::lock_guard lock(work_mutex_);
  if (failing_ || (!deaf_ && channel_.has_entry()) || channel_.can_flush()) return true;
  if (leader_ && leader_->has_work()) return true;
  return gpu_ready() || std::any_of(lanes_.begin(), lanes_.end(),
                                    [](const auto& entry) { return entry.second.lane->ready(); });
}

bool Engine::moving() const {
  std::lock_guard lock(work_mutex_);
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const auto& entry) { return entry.second.lane->busy(); });
}

Deadline Engine::look_again() const {
  Deadline soonest = Deadline::never();
  for (const auto& [id, lane] : lanes_) soonest = std::min(soonest, lane.lane->look_again());
  return soonest;
}

Deadline Engine::next_tick() const {
  std::lock_guard lock(work_mutex_);
  return std::min(look_again(), leader_ ? leader_->next_tick() : Deadline::never());
}

void Engine::fail(Failure failure) {
  std::lock_guard lock(mutex_);
  if (!found_) found_ = std::move(failure);
  failing_ = true;
}

void Engine::apply(const Entry& entry) {
  ++log_position_;
  std::visit([this](const auto& e) { on(e); }, entry);
}

void Engine::report(const Report& report) {
  std::lock_guard lock(mutex_);
  report_locked(report);
}

void Engine::report_locked(const Report& report) {
  pass(Report(report), 0);
  if (take_news()) channel_.ring_leader();
}

void Engine::pass(Report&& report, Handle handle) {
  bundler_.pass(std::move(report), handle, passed_);
  send_passed();
}

void Engine::pass_known(uint32_t id, Contribution&& given, Handle handle) {
  if (given.has_input && bundler_.withhold(id, handle, passed_)) return send_passed();
  pass(Ready{id, {}, 0, std::move(given)}, handle);
}

void Engine::send_passed() {
  for (const Report& report : passed_) {
    if (hurried_ && says_ready(report)) hurried_ = false;
    encoded_.clear();
    encode(report, encoded_);
    channel_.report(encoded_);
  }
  if (!passed_.empty()) news_.store(true, std::memory_order_release);
  passed_.clear();
  withheld_.store(bundler_.withheld(), std::memory_order_release);
}

void Engine::await(std::span<const Handle> handles) {
  if (withheld_ == 0) return;
  std::lock_guard lock(mutex_);
  bundler_.await(handles, passed_);
  send_passed();
  if (take_news()) channel_.ring_leader();
}

// The leader of rank 0's host gathers nothing.
void Engine::hurry() {
  if (topology_.leader() == 0 || hurried_) return;
  std::lock_guard lock(mutex_);
  if (!hurried_.exchange(true)) report_locked(Hurry{});
}

void Engine::on(const Define& define) {
  std::lock_guard lock(mutex_);
  pending_.define(define);
}

void Engine::on(const Forget& forget) {
  {
    std::lock_guard lock(mutex_);
    pending_.forget(forget.id);
  }
  report(Forgot{forget.id});
}

void Engine::on(const Run& run) {
  if (broken_) return;
  auto lane = lanes_.find(run.set);
  if (lane == lanes_.end()) return;
  auto endings = std::make_shared<std::vector<Ending>>();
  const ProcessSet& set = sets_.own(run.set);
  const bool lowest = set.member == 0;
  Bucket bucket = bucket_of(run, set, *endings);
  bucket.done = [this, endings](const Failure* failure) {
    for (Ending& ending : *endings) {
      if (ending.launched) {
        settle(ending, failure);
      } else if (failure) {
        ending.outcome.failure = *failure;
      }
    }
    finish_all(*endings);
  };
  if (lowest) {
    bucket.done = [this, set = run.set, number = run.bucket, gpu = run.gpu,
                   done = std::move(bucket.done)](const Failure* failure) {
      done(failure);
      if (!failure) report(Done{set, number, gpu});
    };
  }
  watch(bucket, run);
  if (run.gpu) return push_gpu(run, std::move(bucket), std::move(endings));
  const bool unmoved = static_cast<bool>(lane->second.lane->fault());
  lane->second.lane->push(std::move(bucket));
  if (lowest && unmoved) report(Done{run.set, run.bucket});
}

// Tells the recorder when the bucket begins and ends.
void Engine::watch(Bucket& bucket, const Run& run) {
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
std::vector<Item> Engine::items_of(const Run& run, const ProcessSet& set) const {
  std::vector<Item> items = run.items;
  for (uint32_t bundle : run.bundles) {
    for (uint32_t id : bundler_.ids_of(bundle)) {
      const bool average = traits_of(pending_.request_of(id).signature.reduce_op).divides;
      items.push_back({id, 0, average ? set.members() : 1, {}, {}});
    }
  }
  return items;
}

// Memory for outputs whose size only negotiation knew comes from here. Requests, sets and the calls of
// bundles change by the log alone, which the driver reads: submitters need not wait for all this.
Bucket Engine::bucket_of(const Run& run, const ProcessSet& set, std::vector<Ending>& endings) {
  const std::vector<Item> items = items_of(run, set);
  std::vector<std::optional<Submission>> taken;
  taken.reserve(items.size());
  {
    std::lock_guard lock(mutex_);
    for (const Item& item : items) taken.push_back(pending_.take(item.id, item.sequence));
  }
  Bucket bucket;
  bucket.parts.reserve(items.size());
  endings.reserve(items.size());
  const int64_t now = now_ns();
  for (size_t i = 0; i < items.size(); ++i) {
    const Request& request = pending_.request_of(items[i].id);
    std::optional<Submission>& mine = taken[i];
    Part part = part_of(items[i], request, set, mine);
    if (mine) {
      const bool on_gpu = request.signature.device != kCpuDevice;
      Outcome outcome = outcome_of(part.signature, part.rows, set, *mine,
                                   on_gpu ? gpu_.load()->device() : nullptr);
      recorder_.negotiated(mine->recorded, run.bucket, log_position_, now);
      part.output = outcome.output;
      endings.push_back({std::move(*mine), std::move(outcome)});
    }
    bucket.parts.push_back(std::move(part));
  }
  return bucket;
}

void Engine::finish(Submission submission, Outcome outcome) {
  Ending ending{std::move(submission), std::move(outcome)};
  finish_all({&ending, 1});
}

// Each step for all of them: submitters want the mutex too. What was launched is not told again. A name is
// free before its handle is done.
void Engine::finish_all(std::span<Ending> endings) {
  {
    std::lock_guard lock(mutex_);
    for (const Ending& ending : endings) {
      if (!ending.launched) pending_.finish(ending.submission);
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
  handles_.finish_all([&](auto&& end) {
    for (Ending& ending : endings) {
      if (!ending.launched) end(ending.submission.handle, std::move(ending.outcome));
    }
  });
}

}  // namespace farandole
