// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "base/error.h"
#include "base/logging.h"
#include "base/overloaded.h"

namespace farandole {
namespace {

constexpr std::chrono::seconds kStagingTimeout{10};

}  // namespace

void Lanes::open(SetId id, const ProcessSet& set, const std::shared_ptr<Segment>& staging) {
  lanes_.emplace(id, Opened{staging, make_(id, set, *staging, Feeds::kHost)});
}

Lane* Lanes::find(SetId id) {
  auto found = lanes_.find(id);
  return found == lanes_.end() ? nullptr : found->second.lane.get();
}

void Lanes::push(SetId id, Bucket bucket) {
  Lane& lane = *lanes_.at(id).lane;
  if (is_pair(id)) use_pair(lane);
  lane.push(std::move(bucket));
}

void Lanes::use_pair(Lane& lane) {
  if (!pairs_.empty() && pairs_.back() == &lane) return;
  std::erase(pairs_, &lane);
  pairs_.push_back(&lane);
  free_pairs();
}

// Frees the memory of the pairs that were not used for the longest time; a later step frees what peers still read.
void Lanes::free_pairs() {
  size_t held = 0;
  still_read_ = false;
  for (Lane* one : std::views::reverse(pairs_)) {
    if (one != pairs_.back() && held + one->held() > kMostHeld) {
      one->rest();
      still_read_ |= one->held() > 0;
    }
    held += one->held();
  }
}

bool Lanes::step() {
  bool moved = false;
  for (auto& [id, opened] : lanes_) moved |= opened.lane->step();
  if (still_read_) free_pairs();
  return moved;
}

bool Lanes::ready() const {
  return std::ranges::any_of(lanes_, [](const auto& one) { return one.second.lane->ready(); });
}

bool Lanes::busy() const {
  return std::ranges::any_of(lanes_, [](const auto& one) { return one.second.lane->busy(); });
}

Deadline Lanes::look_again() const {
  Deadline soonest = Deadline::never();
  for (const auto& [id, opened] : lanes_) soonest = std::min(soonest, opened.lane->look_again());
  return soonest;
}

void Lanes::abort(const Failure& failure) {
  for (auto& [id, opened] : lanes_) opened.lane->abort(failure);
}

std::shared_ptr<GpuDevice> GpuBuckets::device() const {
  RankGpu* gpu = gpu_;
  return gpu ? gpu->device() : nullptr;
}

void GpuBuckets::push(SetId set, BegunRun run) {
  GpuBucket launched{set, std::move(run.bucket.parts), std::move(run.label), {}, {}};
  launched.launched = [this, endings = std::move(run.endings),
                       begun = std::move(run.bucket.begun)](const std::shared_ptr<GpuEvent>& past) {
    if (begun) begun();
    for (Ending& ending : *endings) calls_.launch(ending, past);
  };
  launched.done = std::move(run.bucket.done);
  gpu().lane().push(std::move(launched));
}

bool GpuBuckets::send_key() {
  const auto key = gpu().lane().new_key();
  if (key) calls_.report(SetUp{key->first, key->second});
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

// In program order, launches only while the program waits for a bucket not yet launched. So NCCL work that
// the program launches before or after that wait is in the same order relative to ours on all ranks.
bool GpuBuckets::may_launch() const {
  if (!gpu().holds_launches()) return true;
  std::lock_guard lock(wanted_mutex_);
  return std::ranges::any_of(wanted_,
                             [&](Handle handle) { return calls_.handles.unlaunched(handle); });
}

bool GpuBuckets::step() {
  RankGpu* gpu = gpu_;
  return gpu && (send_key() || gpu->lane().step(may_launch()));
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

// On normal shutdown, waits for launched buckets, whose results may still be on their way.
void GpuBuckets::abort(const Failure& failure, bool together) {
  RankGpu* gpu = gpu_;
  if (!gpu) return;
  if (failure.code == ErrorCode::kShutdown) gpu->lane().drain();
  gpu->lane().abort(failure, together);
}

Engine::Engine(Setup setup, Segment world_staging)
    : setup_(std::move(setup)), calls_(setup_.calls), lanes_(setup_.open_lane), gpu_(calls_) {
  calls_.on(OpenSet{kWorldSet, numbers_below(setup_.topology.size), {}});
  open(kWorldSet, std::move(world_staging));
}

void Engine::open(SetId id, Segment staging) {
  const auto shared = std::make_shared<Segment>(std::move(staging));
  const ProcessSet set = *calls_.find_set(id);
  lanes_.open(id, set, shared);
  calls_.use(id, setup_.open_cell(id, set, shared));
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
  if (calls_.job.stopped()) return false;
  const bool moved = say();
  if (setup_.leader && calls_.job.broken()) setup_.leader->leave(calls_.job.failure());
  return moved;
}

// Sends own reports that found the ring full, and lets the leader work.
bool Engine::say() {
  bool moved = setup_.channel.can_flush() && calls_.flush();
  if (setup_.leader) moved |= setup_.leader->step();
  return moved;
}

// Failures found locally come after the log, which may hold a better reason, or say that all have stopped.
bool Engine::control() {
  bool moved = say();
  for (bool first = true; !log_closed_; first = false) {
    const auto message = setup_.channel.next_entry();
    if (!message) break;
    if (first) setup_.recorder.cycle();
    moved = true;
    apply(decode_entry(*message));
  }
  Failure found;
  if (!calls_.job.take_found(found)) return moved;
  act_on(std::move(found));
  return true;
}

bool Engine::has_work() const {
  std::lock_guard lock(work_mutex_);
  if (calls_.job.failing() || (!log_closed_ && setup_.channel.has_entry()) ||
      setup_.channel.can_flush())
    return true;
  if (setup_.leader && setup_.leader->has_work()) return true;
  return gpu_.ready() || lanes_.ready();
}

bool Engine::moving() const {
  std::lock_guard lock(work_mutex_);
  return lanes_.busy();
}

Deadline Engine::next_tick() const {
  std::lock_guard lock(work_mutex_);
  return std::min(lanes_.look_again(),
                  setup_.leader ? setup_.leader->next_tick() : Deadline::never());
}

void Engine::use_gpu(RankGpu& gpu) {
  gpu_.use(gpu);
  calls_.report(gpu.describe(setup_.topology.leader()));
}

void Engine::apply(const Entry& entry) {
  ++log_position_;
  std::visit(Overloaded{
                 [&](const Run& e) { on(e); },
                 [&](const Result& e) { calls_.on(e, log_position_, gpu_.device()); },
                 [&](const OpenSet& e) { on(e); },
                 [&](const CloseSet& e) { on(e); },
                 [&](const SetUp& e) { on(e); },
                 [&](const Notice& e) { on(e); },
                 [&](const Abort& e) { break_down(e.failure); },
                 [&](const Stop&) {
                   calls_.job.stop();
                   calls_.handles.announce();
                 },
                 [&](const CollectStacks& e) {
                   if (std::ranges::count(e.ranks, setup_.topology.rank) > 0)
                     setup_.report_stacks();
                 },
                 [&](const auto& e) { calls_.on(e); },
             },
             entry);
}

void Engine::on(const Run& run) {
  if (calls_.job.broken() || !lanes_.find(run.set)) return;
  const bool labelled = run.gpu && gpu_.gpu().names_ranges();
  BegunRun begun = calls_.begin(run, log_position_, gpu_.device(), labelled);
  if (run.gpu) return gpu_.push(run.set, std::move(begun));
  lanes_.push(run.set, std::move(begun.bucket));
}

Segment Engine::take_staging(SetId id) {
  return setup_.leader ? setup_.leader->take_staging(id)
                       : setup_.links.receive(id, Deadline::in(kStagingTimeout));
}

void Engine::on(const OpenSet& open) {
  const bool own = std::ranges::count(open.ranks, setup_.topology.rank) > 0;
  if (is_pair(open.set) && !own) return;
  calls_.on(open);
  if (own) this->open(open.set, take_staging(open.set));
}

void Engine::on(const CloseSet& close) {
  if (Lane* lane = lanes_.find(close.set)) {
    const Failure removed = gone(close.set);
    lane->abort(removed);
    lanes_.close(close.set);
    gpu_.close(close.set, removed);
  }
  calls_.on(close);
}

void Engine::on(const SetUp& step) {
  const std::optional<ProcessSet> set = calls_.find_set(step.set);
  if (!set || set->member < 0 || calls_.job.broken()) return;
  if (step.backend == BackendKind::kLibrary)
    return gpu_.gpu().set_up(step, set->member, set->members());
  Segment& staging = gpu_.staging(step.set);
  staging = take_staging(step.set);
  gpu_.gpu().open_staged(step.set, lanes_.make(step.set, *set, staging), set->member,
                         set->members());
}

void Engine::on(const Notice& notice) {
  const std::optional<ProcessSet> set = calls_.find_set(notice.set);
  if (!set || set->member < 0) return;
  log(LogLevel::kWarning, notice.text);
  setup_.tell_finding(notice.text);
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
  calls_.break_down(failure);
  lanes_.abort(failure);
  gpu_.abort(failure, calls_.job.stopped());
  calls_.clear(failure);
}

}  // namespace farandole
