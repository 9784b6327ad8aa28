// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/logging.h"
#include "base/overloaded.h"
#include "runtime/calls/outcome.h"
#include "runtime/gpu/rank_gpu.h"

namespace farandole {
namespace {

constexpr std::chrono::seconds kStagingTimeout{10};

Outcome failed(Failure failure) {
  Outcome outcome;
  outcome.failure = std::move(failure);
  return outcome;
}

Outcome valued(int64_t value) {
  Outcome outcome;
  outcome.value = value;
  return outcome;
}

}  // namespace

Engine::Engine(Setup setup)
    : topology_(setup.topology),
      links_(setup.links),
      channel_(setup.channel),
      leader_(setup.leader),
      calls_(setup.calls),
      recorder_(setup.recorder),
      report_stacks_(std::move(setup.report_stacks)),
      finisher_(setup.calls, setup.recorder, std::move(setup.on_failure)),
      buckets_(setup.calls, setup.recorder, finisher_),
      lanes_(std::move(setup.open_lane)),
      gpu_(setup.calls, finisher_) {
  std::vector<Rank> world = numbers_below(topology_.size);
  recorder_.open_set(kWorldSet, world);
  calls_.sets.open(kWorldSet, std::move(world));
  lanes_.open(kWorldSet, *calls_.sets.find(kWorldSet), std::move(setup.world_staging));
}

bool Engine::step() {
  std::lock_guard lock(work_mutex_);
  bool moved = control();
  moved |= lanes_.step();
  moved |= gpu_.step();
  return moved;
}

bool Engine::control_step() {
  std::lock_guard lock(work_mutex_);
  return control();
}

bool Engine::say_last() {
  std::lock_guard lock(work_mutex_);
  return !calls_.job.stopped() && say();
}

// Sends own reports that found the ring full, and lets the leader work.
bool Engine::say() {
  bool moved = false;
  if (channel_.can_flush()) {
    std::lock_guard lock(calls_.mutex);
    moved = calls_.reporter.flush();
  }
  if (leader_) moved |= leader_->step();
  return moved;
}

// Failures found locally come after the log, which may hold a better reason, or say that all have stopped.
bool Engine::control() {
  bool moved = say();
  for (bool first = true; !log_closed_; first = false) {
    ByteView message = channel_.next_entry();
    if (message.empty()) break;
    if (first) recorder_.cycle();
    moved = true;
    apply(decode_entry(message));
  }
  Failure found;
  if (!calls_.job.take_found(found)) return moved;
  act_on(std::move(found));
  return true;
}

bool Engine::has_work() const {
  std::lock_guard lock(work_mutex_);
  if (calls_.job.failing() || (!log_closed_ && channel_.has_entry()) || channel_.can_flush())
    return true;
  if (leader_ && leader_->has_work()) return true;
  return gpu_.ready() || lanes_.ready();
}

bool Engine::moving() const {
  std::lock_guard lock(work_mutex_);
  return lanes_.busy();
}

Deadline Engine::next_tick() const {
  std::lock_guard lock(work_mutex_);
  return std::min(
      {lanes_.look_again(), gpu_.look_again(), leader_ ? leader_->next_tick() : Deadline::never()});
}

void Engine::use_gpu(RankGpu& gpu) {
  calls_.reporter.send(gpu.describe(topology_.leader()));
  gpu_.use(gpu);
}

void Engine::apply(const Entry& entry) {
  ++log_position_;
  std::visit(Overloaded{
                 [&](const Define& e) {
                   std::lock_guard lock(calls_.mutex);
                   calls_.pending.define(e);
                 },
                 [&](const Forget& e) {
                   std::lock_guard lock(calls_.mutex);
                   calls_.pending.forget(e.id);
                   calls_.reporter.send(Forgot{e.id});
                 },
                 [&](const Abort& e) { break_down(e.failure); },
                 [&](const Stop&) {
                   calls_.job.stop();
                   calls_.handles.announce();
                 },
                 [&](const CollectStacks& e) {
                   if (std::ranges::count(e.ranks, topology_.rank) > 0) report_stacks_();
                 },
                 [&](const auto& e) { on(e); },
             },
             entry);
}

void Engine::on(const Run& run) {
  Lane* lane = lanes_.find(run.set);
  if (calls_.job.broken() || !lane) return;
  BucketMaker::Made made =
      buckets_.make(run, calls_.sets.own(run.set), log_position_, gpu_.device());
  if (run.gpu) {
    return gpu_.push(run.set, std::move(made), [&] { return buckets_.label_of(run); });
  }
  lane->push(std::move(made.bucket));
}

void Engine::on(const Result& result) {
  std::optional<Submission> mine;
  Outcome outcome;
  {
    std::lock_guard lock(calls_.mutex);
    ProcessSet* set = calls_.sets.find(result.set);
    if (!set || set->member < 0) return;
    mine = calls_.pending.take(result.id, result.sequence);
    if (!mine) return;
    recorder_.negotiated(mine->recorded, 0, log_position_, now_ns());
    const Signature& signature = calls_.pending.request_of(result.id).signature;
    const bool on_gpu = mine->device != kCpuDevice;
    outcome = outcome_of(signature, rows_of(result.rows, signature, set->members()), *set, *mine,
                         on_gpu ? gpu_.device() : nullptr);
  }
  outcome.absent = result.absent;
  if (outcome.output && !result.payload.empty()) {
    std::memcpy(outcome.output, result.payload.data(), result.payload.size());
  }
  finisher_.finish(std::move(*mine), std::move(outcome));
}

// Also for removed sets: a report of this rank may have come too late.
void Engine::on(const Fail& fail) {
  if (std::ranges::count(fail.unheard, topology_.rank) > 0) return;
  if (fail.key.posted() && fail.key.poster != topology_.rank) return;
  std::optional<Submission> mine;
  {
    std::lock_guard lock(calls_.mutex);
    std::vector<Report> next;
    if (fail.key.posted()) {
      mine = calls_.posted.take(fail.key.sequence);
    } else {
      mine = calls_.pending.fail(fail.key, next);
    }
    for (const Report& report : next) calls_.reporter.send(report);
    if (!next.empty()) calls_.tell_join(fail.key.set);
  }
  if (mine) finisher_.finish(std::move(*mine), failed(fail.failure));
}

void Engine::on(const Joined& joined) {
  RecordedCall over;
  {
    std::lock_guard lock(calls_.mutex);
    ProcessSet* set = calls_.sets.find(joined.set);
    if (!set || set->member < 0) return;
    over = std::exchange(set->join, {});
    if (over.call == 0) return;  // other ranks' join; this rank counts its own calls
    calls_.pending.resume(joined.set, joined.next_sequence);
  }
  if (joined.failure) {
    recorder_.failed(over, joined.failure);
  } else {
    recorder_.done(over, now_ns());
  }
  calls_.handles.finish(over.call, joined.failure ? failed(joined.failure) : valued(joined.last));
}

void Engine::on(const Matched& matched) {
  const bool sends = matched.sender == topology_.rank;
  if (!sends && matched.receiver != topology_.rank) return;
  std::lock_guard lock(calls_.mutex);
  std::optional<Submission> mine = calls_.posted.take(sends ? matched.sent : matched.received);
  if (!mine) return;
  mine->value = matched.sender;
  mine->recorded.set = matched.pair;  // whose buckets move it
  calls_.pending.submit(matched.pair, matched.sequence, std::move(*mine));
}

Segment Engine::take_staging(SetId id) {
  return leader_ ? leader_->take_staging(id) : links_.receive(Deadline::in(kStagingTimeout));
}

void Engine::on(const OpenSet& open) {
  if (is_pair(open.set) && std::ranges::count(open.ranks, topology_.rank) == 0) return;
  std::optional<Submission> mine;
  {
    std::lock_guard lock(calls_.mutex);
    if (!is_pair(open.set)) {  // a pair's has no key
      recorder_.open_set(open.set, open.ranks);
      mine = calls_.pending.take(open.key);
    }
    calls_.sets.open(open.set, open.ranks);
    if (calls_.sets.find(open.set)->member >= 0) {
      lanes_.open(open.set, *calls_.sets.find(open.set), take_staging(open.set));
    }
  }
  if (mine) finisher_.finish(std::move(*mine), valued(open.set));
}

void Engine::on(const CloseSet& close) {
  std::optional<Submission> mine;
  if (Lane* lane = lanes_.find(close.set)) {
    const Failure gone{
        ErrorCode::kInvalidArgument,
        "process set " + std::to_string(close.set) + " was removed while this call was under way"};
    lane->abort(gone);
    lanes_.close(close.set);
    gpu_.close(close.set, gone);
  }
  {
    std::lock_guard lock(calls_.mutex);
    recorder_.close_set(close.set);
    calls_.sets.close(close.set);
    mine = calls_.pending.take(close.key);
  }
  if (mine) finisher_.finish(std::move(*mine), valued(close.set));
}

void Engine::on(const Inform& inform) {
  if (inform.to != topology_.rank) return;
  {
    std::lock_guard lock(calls_.mutex);
    calls_.questions.answer(inform.number, inform.text);
  }
  calls_.handles.announce();
}

void Engine::on(const SetUp& step) {
  ProcessSet set;
  {
    std::lock_guard lock(calls_.mutex);
    ProcessSet* found = calls_.sets.find(step.set);
    if (!found || calls_.job.broken()) return;
    set = *found;
  }
  if (step.backend == BackendKind::kLibrary) return gpu_.set_up(step, set);
  if (set.member < 0) return;
  Segment& staging = gpu_.staging(step.set);
  staging = take_staging(step.set);
  gpu_.gpu().open_staged(step.set, lanes_.make(step.set, set, staging), set.member, set.members());
}

void Engine::give_up(const Failure& failure) {
  std::lock_guard lock(work_mutex_);
  log_closed_ = true;
  break_down(failure);
}

void Engine::act_on(Failure found) {
  // After Stop, the death of a peer only means that it ended first.
  if (calls_.job.stopped()) found = {ErrorCode::kShutdown, "farandole has been shut down"};
  const bool over = calls_.job.broken() || calls_.job.stopped();
  if (found.code == ErrorCode::kPeer && !over) log(LogLevel::kError, found.text);
  break_down(found);
}

// Refuses new calls; the lanes release all buffers; then everything that waits fails.
void Engine::break_down(const Failure& failure) {
  if (calls_.job.broken()) return;
  {
    std::lock_guard lock(calls_.mutex);
    calls_.job.break_down(failure);
  }
  recorder_.job_failed(failure);
  finisher_.tell_first(failure);
  lanes_.abort(failure);
  gpu_.abort(failure, calls_.job.stopped());
  std::lock_guard lock(calls_.mutex);
  calls_.pending.clear();
  calls_.posted.clear();
  calls_.sets.clear_joins();
  calls_.handles.fail_all(failure);
}

}  // namespace farandole
