// SPDX-License-Identifier: Apache-2.0
// What the rarer log entries do to this rank. The daily ones (define, run) are in engine.cc.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "runtime/calls/outcome.h"
#include "runtime/engine/engine.h"
#include "runtime/gpu/rank_gpu.h"

namespace farandole {
namespace {

constexpr size_t kMaxAnswers = 64;
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

void Engine::on(const Result& result) {
  std::optional<Submission> mine;
  Outcome outcome;
  {
    std::lock_guard lock(mutex_);
    ProcessSet* set = sets_.find(result.set);
    if (!set || set->member < 0) return;
    mine = pending_.take(result.id, result.sequence);
    if (!mine) return;
    recorder_.negotiated(mine->recorded, 0, log_position_, now_ns());
    const Signature& signature = pending_.request_of(result.id).signature;
    const bool on_gpu = mine->device != kCpuDevice;
    outcome = outcome_of(signature, rows_of(result.rows, signature, set->members()), *set, *mine,
                         on_gpu ? gpu_.load()->device() : nullptr);
  }
  outcome.absent = result.absent;
  if (outcome.output && !result.payload.empty()) {
    std::memcpy(outcome.output, result.payload.data(), result.payload.size());
  }
  finish(std::move(*mine), std::move(outcome));
}

// Also of sets that are gone: a report of ours may have come too late.
void Engine::on(const Fail& fail) {
  if (std::ranges::count(fail.unheard, topology_.rank) > 0) return;
  std::optional<Submission> mine;
  {
    std::lock_guard lock(mutex_);
    ProcessSet* set = sets_.find(fail.key.set);
    std::optional<Report> next;
    mine = pending_.fail(fail.key, set && set->join, next);
    if (next) report_locked(*next);
  }
  if (mine) finish(std::move(*mine), failed(fail.failure));
}

void Engine::on(const Joined& joined) {
  Handle handle = 0;
  {
    std::lock_guard lock(mutex_);
    ProcessSet* set = sets_.find(joined.set);
    if (!set || set->member < 0) return;
    handle = std::exchange(set->join, 0);
    if (!handle) return;  // others have joined: this rank counts its own calls
    pending_.resume(joined.set, joined.next_sequence);
  }
  handles_.finish(handle, valued(joined.last));
}

void Engine::open_lane(SetId id, Segment staging) {
  LaneOfSet lane{std::move(staging), nullptr};
  lane.lane = make_lane_(id, *sets_.find(id), lane.staging);
  lanes_.emplace(id, std::move(lane));
}

Segment Engine::take_staging(SetId id) {
  return leader_ ? leader_->take_staging(id) : links_.receive(Deadline::in(kStagingTimeout));
}

void Engine::on(const OpenSet& open) {
  std::optional<Submission> mine;
  {
    std::lock_guard lock(mutex_);
    recorder_.open_set(open.set, open.ranks);
    sets_.open(open.set, open.ranks);
    mine = pending_.take(open.key);
    if (sets_.find(open.set)->member >= 0) {
      open_lane(open.set, take_staging(open.set));
    }
  }
  if (mine) finish(std::move(*mine), valued(open.set));
}

void Engine::on(const CloseSet& close) {
  std::optional<Submission> mine;
  if (auto lane = lanes_.find(close.set); lane != lanes_.end()) {
    const Failure gone{
        ErrorCode::kInvalidArgument,
        "process set " + std::to_string(close.set) + " was removed while this call was under way"};
    lane->second.lane->abort(gone);
    lanes_.erase(lane);
    close_gpu(close.set, gone);
  }
  {
    std::lock_guard lock(mutex_);
    recorder_.close_set(close.set);
    sets_.close(close.set);
    mine = pending_.take(close.key);
  }
  if (mine) finish(std::move(*mine), valued(close.set));
}

void Engine::on(const Bundle& bundle) {
  std::lock_guard lock(mutex_);
  ProcessSet* set = sets_.find(bundle.set);
  if (broken_ || !set || set->member < 0) return;
  bundler_.open(bundle, [this](uint32_t id) { return pending_.under_way(id); });
}

void Engine::on(const Unbundle& unbundle) {
  std::lock_guard lock(mutex_);
  bundler_.close(unbundle.id, passed_);
  send_passed();
  if (take_news()) channel_.ring_leader();
}

void Engine::on(const Abort& abort) { break_down(abort.failure); }

void Engine::on(const Stop&) {
  stopped_ = true;
  handles_.announce();
}

void Engine::on(const WhereAre& where) {
  if (std::ranges::count(where.ranks, topology_.rank) > 0) tell_whereabouts_();
}

void Engine::on(const Inform& inform) {
  if (inform.to != topology_.rank) return;
  {
    std::lock_guard lock(mutex_);
    answers_[inform.number] = inform.text;
    // Who asked may have waited no longer: such answers are not kept for ever.
    if (answers_.size() > kMaxAnswers) answers_.erase(answers_.begin());
  }
  handles_.announce();
}

std::optional<std::string> Engine::take_answer(uint64_t number) {
  std::lock_guard lock(mutex_);
  auto answer = answers_.extract(number);
  return answer ? std::optional(std::move(answer.mapped())) : std::nullopt;
}

void Engine::give_up(const Failure& failure) {
  std::lock_guard lock(work_mutex_);
  deaf_ = true;
  break_down(failure);
}

// What is told early may explain what follows; an error that a script handles again and again is told
// once.
void Engine::tell_first(const Failure& failure) {
  const bool ends_well = failure.code == ErrorCode::kShutdown;
  if (!ends_well && told_.insert(failure.code).second) on_failure_(failure);
}

// After the log, which tells why a rank left before its end is seen, and whether all have stopped.
void Engine::take_failure() {
  Failure failure;
  {
    std::lock_guard lock(mutex_);
    failure = found_;
  }
  // After the end a peer that goes is no news: it was only faster.
  if (stopped_) failure = {ErrorCode::kShutdown, "farandole has been shut down"};
  bool news = failure.code == ErrorCode::kPeer && !broken_ && !stopped_;
  if (news) log(LogLevel::kError, failure.text);
  break_down(failure);
}

// New calls are refused from here on. The lanes let go of all buffers; then everything that waits fails.
void Engine::break_down(const Failure& failure) {
  if (broken_) return;
  {
    std::lock_guard lock(mutex_);
    failure_ = failure;
    broken_ = true;
  }
  recorder_.job_failed(failure);
  tell_first(failure);
  for (auto& [id, lane] : lanes_) lane.lane->abort(failure);
  abort_gpu(failure);
  std::lock_guard lock(mutex_);
  pending_.clear();
  bundler_.clear();
  withheld_ = 0;
  sets_.clear_joins();
  handles_.fail_all(failure);
}

}  // namespace farandole
