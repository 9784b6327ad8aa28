// SPDX-License-Identifier: Apache-2.0
// Waiting and driving.
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "lib/os/thread.h"
#include "runtime/runtime.h"

namespace farandole {

// Of a thread that has it. Gives it back whatever happens, and hands on what is left to do, also what
// will be to do at a time that no bell rings for.
struct Runtime::Role {
  Runtime& runtime;
  ~Role() {
    runtime.bell_->stop_driving(
        [this] { return runtime.work_is_left() || runtime.sleeps_past_tick(); });
  }
};

// The time that a caller blocks. Slices of one wait count as one.
struct Waiting {
  Recorder& recorder;
  bool over = true;
  Waiting(Recorder& its_recorder, Handle first, uint32_t name) : recorder(its_recorder) {
    recorder.wait_begins(first, name);
  }
  ~Waiting() { recorder.wait_ends(over); }
};

// In program order buckets on GPUs are launched for waiters only.
struct Wanted {
  Engine& engine;
  std::span<const Handle> handles;
  Wanted(Engine& its_engine, std::span<const Handle> its_handles)
      : engine(its_engine), handles(its_handles) {
    engine.want(handles);
  }
  ~Wanted() { engine.unwant(handles); }
};

// Reports lie in the leader's ring. The leader itself looks at them at once: often it need not wake its
// background thread then.
void Runtime::after_submit() {
  if (!engine_->take_news()) return;
  if (!leader_) return channel_->ring_leader();
  if (!bell_->try_drive()) return bell_->notify();
  Role role{*this};
  guarded([this] { return engine_->control_step(); });
}

// For whoever does not drive: a driver looks by itself.
bool Runtime::work_is_left() const { return !bell_->driven() && engine_->has_work(); }

// Nobody drives, and the background thread is to sleep longer than it may.
bool Runtime::sleeps_past_tick() const {
  return !bell_->driven() && engine_->next_tick() < Deadline::at(sleeps_until_ns_);
}

// The engine's errors are the job's: every rank must hear of them.
template <class Step>
bool Runtime::guarded(Step&& step) {
  Failure failure;
  try {
    return step();
  } catch (const Error& error) {
    failure = {error.code(), error.what()};
  } catch (const std::exception& error) {
    failure = {ErrorCode::kInternal, std::string("out of control: ") + error.what()};
  }
  if (!engine_->broken()) engine_->report(Leave{true, failure.text});
  engine_->give_up(failure);
  return true;
}

bool Runtime::step() {
  return guarded([this] { return engine_->step(); });
}

// Nobody drives any more.
void Runtime::say_last() {
  guarded([this] { return engine_->say_last(); });
}

// Drives until done() or the deadline; false: a signal came. The caller has the driver's role.
template <class Predicate>
bool Runtime::drive(Predicate&& done, Deadline deadline) {
  auto has_work = [this] { return engine_->has_work(); };
  for (;;) {
    uint32_t ticket = bell_->prepare();
    bool moved = step();
    if (done()) return true;
    if (moved || spin_(engine_->moving(), has_work)) continue;
    if (deadline.expired()) return true;
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    Deadline until = std::min(deadline, engine_->next_tick());
    if (bell_->wait(Sleeper::kCaller, ticket, has_work, until) == WaitResult::kInterrupted) {
      return false;
    }
  }
}

// As a driver if nobody else drives; else asleep until some handle is done. done() throws on unknown
// handles.
bool Runtime::await(const std::function<bool()>& done, Deadline deadline) {
  while (!done()) {
    if (deadline.expired()) return false;
    uint32_t ticket = handles().prepare();
    if (bell_->try_drive()) {
      bool calm = [&] {
        Role role{*this};
        return drive(done, deadline);
      }();
      if (!calm) return done();
    } else if (!done()) {
      if (!handles().wait(ticket, deadline)) return done();
    }
  }
  return true;
}

WaitEnd Runtime::wait(std::span<const Handle> wanted, Deadline deadline, Failure& failure) {
  size_t ready = 0;
  engine_->await(wanted);
  auto done = [&] { return handles().finished(wanted, ready, failure); };
  if (done()) return failure ? WaitEnd::kFailed : WaitEnd::kDone;
  engine_->hurry();
  const Wanted held(*engine_, wanted);
  const Handle first = wanted[ready];
  Waiting waiting(*recorder_, first, handles().label_of(first));
  for (;;) {
    const Deadline look = leader_stands_->next_look();
    if (await(done, std::min(deadline, look))) return failure ? WaitEnd::kFailed : WaitEnd::kDone;
    look_at_leader();
    if (!deadline.expired() && look.expired()) continue;
    waiting.over = false;
    return WaitEnd::kTimeIsUp;  // or a signal
  }
}

std::string Runtime::explain(Handle handle, Deadline deadline) {
  const uint64_t number = ++questions_;
  {
    std::lock_guard lock(engine_->mutex());
    std::optional<SetId> joined = engine_->sets().joined_by(handle);
    std::optional<CallKey> key = engine_->pending().key_of(handle);
    if (joined) key = CallKey{*joined, "", 0};
    if (!key) return "all ranks have submitted it, and its bytes are under way";
    engine_->pass(Inquire{number, *key, joined.has_value()}, 0);
  }
  after_submit();
  std::optional<std::string> text;
  auto answered = [&] {
    if (!text) text = engine_->take_answer(number);
    return text || engine_->broken();
  };
  while (!await(answered, deadline) && !deadline.expired()) {
  }
  if (text) return *text;
  if (engine_->broken()) return engine_->failure().text;
  return leader_stands_->stands() ? leader_stands_->text()
                                  : "rank 0, which leads the job, does not answer";
}

bool Runtime::done(Handle handle) {
  engine_->await({&handle, 1});
  const bool over = handles().done(handle);
  if (!over) engine_->hurry();
  return over;
}

// For the background thread.
void Runtime::ask_scheduler() {
  ask_for_short_slice();
  if (config_.priority != "realtime" || ask_for_real_time()) return;
  log(LogLevel::kWarning,
      "FARANDOLE_PRIORITY=realtime is not permitted here, and changes nothing; it needs "
      "CAP_SYS_NICE "
      "(docker run --cap-add SYS_NICE) or a limit of at least 1 in `ulimit -r`");
}

void Runtime::background() {
  ask_scheduler();
  scheduled_.count_down();
  auto has_work = [this] { return engine_->has_work(); };
  auto wanted = [this] { return quit_ || work_is_left() || sleeps_past_tick(); };
  while (!quit_) {
    uint32_t ticket = bell_->prepare();
    bool moved = false;
    if (bell_->try_drive()) {
      moved = step() || spin_(engine_->moving(), has_work);
      bell_->stop_driving([] { return false; });
    }
    if (moved) continue;
    const Deadline tick = bell_->driven() ? Deadline::never() : engine_->next_tick();
    sleeps_until_ns_ = tick.ns();
    bell_->wait(Sleeper::kBackground, ticket, wanted, tick);
  }
}

std::vector<Rank> Runtime::ranks_of(SetId set) {
  std::lock_guard lock(engine_->mutex());
  ProcessSet* found = engine_->sets().find(set);
  if (!found) {
    throw Error(ErrorCode::kInvalidArgument, "there is no process set " + std::to_string(set));
  }
  return found->ranks;
}

}  // namespace farandole
