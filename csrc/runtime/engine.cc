// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/logging.h"
#include "base/overloaded.h"

namespace farandole {
namespace {

constexpr std::chrono::seconds kStagingTimeout{10};

}  // namespace

Engine::Engine(Setup setup, Segment world_staging)
    : setup_(std::move(setup)), calls_(setup_.calls), lanes_(calls_), gpu_(calls_) {
  calls_.on(OpenSet{kWorldSet, numbers_below(setup_.topology.size), {}});
  open(kWorldSet, std::move(world_staging));
}

void Engine::open(SetId id, Segment staging) {
  const auto shared = std::make_shared<Segment>(std::move(staging));
  const ProcessSet set = *calls_.find_set(id);
  lanes_.open(id, shared, setup_.backends.open_backend(id, set, *shared, Feeds::kHost));
  calls_.use(id, setup_.backends.open_cell(id, set, shared, setup_.caller_spin));
}

bool Engine::step() {
  std::lock_guard lock(work_mutex_);
  bool moved = control();
  if (calls_.job.broken()) return moved;
  if (setup_.poller) setup_.poller->take_news();
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
  if (setup_.poller) setup_.poller->collect();
  const bool moved = say();
  if (setup_.leader && calls_.job.broken()) setup_.leader->leave(calls_.job.failure());
  return moved;
}

// Sends reports that did not fit into the ring. On a leader, also runs one step of its HostController.
bool Engine::say() {
  bool moved = setup_.channel.can_flush() && calls_.flush();
  if (setup_.leader && setup_.leader->step()) {
    moved = true;
    tell_of_ranks();
  }
  return moved;
}

// On rank 0, logs warnings about ranks for which others wait, and records late ranks.
void Engine::tell_of_ranks() {
  for (const std::string& notice : setup_.leader->take_notices()) {
    log(LogLevel::kWarning, notice);
    setup_.watch.recorder().dump_host(notice);
  }
  for (const auto& [rank, after_ns] : setup_.leader->late_ranks()) {
    setup_.watch.recorder().late(rank, after_ns);
  }
}

// Reads the log before acting on local failures, because the log may give a better cause or say that all have left.
bool Engine::control() {
  if (setup_.poller) setup_.poller->collect();
  bool moved = say();
  for (bool first = true; !calls_.job.broken(); first = false) {
    const auto message = setup_.channel.next_entry();
    if (!message) break;
    if (first) setup_.watch.recorder().cycle();
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
  if (calls_.job.failing() || setup_.channel.can_flush()) return true;
  if (setup_.leader && setup_.leader->has_work()) return true;
  if (calls_.job.broken()) return false;
  return setup_.channel.has_entry() || gpu_.ready() || lanes_.ready() || sockets_ready();
}

bool Engine::sockets_ready() const {
  return setup_.poller && (setup_.poller->has_news() || setup_.poller->ready());
}

bool Engine::moving() const {
  std::lock_guard lock(work_mutex_);
  return lanes_.busy();
}

std::optional<Stuck> Engine::oldest_bucket() const {
  std::lock_guard lock(work_mutex_);
  const BegunRun *run = lanes_.oldest(), *gpu = gpu_.oldest();
  if (!run || (gpu && gpu->begun_ns < run->begun_ns)) run = gpu;
  if (!run) return std::nullopt;
  Stuck stuck{run->done.set, run->done.bucket, run->done.gpu, now_ns() - run->begun_ns};
  if (stuck.set != kWorldSet) stuck.ranks = run->ranks;
  return stuck;
}

Deadline Engine::next_tick() const {
  std::lock_guard lock(work_mutex_);
  return std::min({lanes_.look_again(), gpu_.look_again(),
                   setup_.leader ? setup_.leader->next_tick() : Deadline::never()});
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
                 [&](const OpenGpu& e) { on(e); },
                 [&](const Notice& e) { on(e); },
                 [&](const Abort& e) { break_down(e.failure); },
                 [&](const Stop&) {
                   calls_.job.stop();
                   calls_.handles.announce();
                 },
                 [&](const CollectStacks& e) {
                   if (std::ranges::count(e.ranks, setup_.topology.rank) > 0) report_stacks();
                 },
                 [&](const auto& e) { calls_.on(e); },
             },
             entry);
}

void Engine::on(const Run& run) {
  if (!lanes_.has(run.set)) return;
  const bool labelled = run.gpu && gpu_.gpu().names_ranges();
  BegunRun begun = calls_.begin(run, log_position_, gpu_.device(), labelled);
  if (run.gpu) return gpu_.push(std::move(begun));
  lanes_.push(run.set, std::move(begun));
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
  if (lanes_.has(close.set)) {
    lanes_.close(close.set);
    gpu_.close(close.set, gone(close.set));
  }
  calls_.on(close);
}

void Engine::on(const OpenGpu& step) {
  const std::optional<ProcessSet> set = calls_.find_set(step.set);
  if (!set || set->member < 0) return;
  if (step.backend == BackendKind::kLibrary)
    return gpu_.gpu().open_library(step, set->member, set->members());
  Segment& staging = gpu_.staging(step.set);
  staging = take_staging(step.set);
  gpu_.gpu().open_staged(step.set,
                         setup_.backends.open_backend(step.set, *set, staging, Feeds::kGpu),
                         set->member, set->members());
}

void Engine::on(const Notice& notice) {
  const std::optional<ProcessSet> set = calls_.find_set(notice.set);
  if (!set || set->member < 0) return;
  log(LogLevel::kWarning, notice.text);
  setup_.watch.recorder().tell_finding(notice.text);
}

// Reports stacks. The main thread counts as blocked if it waits for one call both before and after its stack is taken.
void Engine::report_stacks() {
  const Handle before = main_waits_for;
  const bool waits = calls_.key_of(before).has_value();
  const int64_t direct_ago_ns = calls_.direct_ago_ns();
  setup_.watch.ask_for_stacks(waits, [=, this](StackReporter::Stacks stacks) {
    StackReport report{false, std::move(stacks.text)};
    const std::optional<CallKey> call = calls_.key_of(before);
    report.blocked = call && stacks.main_alone && main_waits_for == before;
    if (report.blocked) report.call = *call;
    report.direct_ago_ns = direct_ago_ns;
    calls_.report(report);
  });
}

void Engine::give_up(const Failure& failure) {
  std::lock_guard lock(work_mutex_);
  act_on(failure);
}

// Ends the job with this failure. Reports the failure to the peers, unless all ranks have left.
void Engine::act_on(Failure found) {
  if (calls_.job.broken()) return;
  found = calls_.job.verdict(std::move(found));
  const bool told = !calls_.job.stopped() && found.code != ErrorCode::kPeer;  // rank 0 logs it
  if (!told && found.code != ErrorCode::kShutdown) log(LogLevel::kError, found.text);
  if (calls_.job.stopped()) return break_down(found);
  // Makes new calls fail, then tells the peers, then closes the lanes' connections. Closing takes seconds on GPUs, and
  // a peer that saw closed connections before the report would blame the network.
  calls_.break_down(found);
  attempt("telling the other ranks", [&] {
    calls_.report(Leave{true, found.text, false});
    say();
  });
  release(found);
}

// Makes new calls fail, then releases the lanes' buffers, then makes all pending calls fail.
void Engine::break_down(const Failure& failure) {
  if (calls_.job.broken()) return;
  calls_.break_down(failure);
  release(failure);
}

void Engine::release(const Failure& failure) {
  const bool together = calls_.job.stopped();
  lanes_.abort(failure);
  gpu_.abort(failure, together);
  calls_.clear(failure);
}

}  // namespace farandole
