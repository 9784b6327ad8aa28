// SPDX-License-Identifier: Apache-2.0
#include "runtime/driver.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/logging.h"
#include "lib/os/thread.h"

namespace farandole {
namespace {

constexpr int64_t kAnswerNs = 1'500'000'000;  // a running rank 0 may need this long to answer

// Records how long a caller blocks. A wait that is interrupted and repeated counts as one wait.
struct RecordedWait {
  Recorder& recorder;
  bool over = true;
  RecordedWait(Recorder& its_recorder, Handle first, uint32_t name) : recorder(its_recorder) {
    recorder.wait_begins(first, name);
  }
  ~RecordedWait() { recorder.wait_ends(over); }
};

// Registers the handles for which a user waits. With FARANDOLE_GPU_ORDER=program, buckets are launched only during such
// a wait.
struct Wanted {
  GpuBuckets& gpu;
  std::span<const Handle> handles;
  Wanted(GpuBuckets& its_gpu, std::span<const Handle> its_handles)
      : gpu(its_gpu), handles(its_handles) {
    gpu.want(handles);
  }
  ~Wanted() { gpu.unwant(handles); }
};

}  // namespace

// Held by the driver. When the Role is destroyed, the thread stops being the driver. If work is left, or if the
// background thread would sleep past the next tick, the destructor also wakes the thread that should drive now.
struct Driver::Role {
  Driver& driver;
  ~Role() {
    driver.setup_.wakeup.stop_driving(
        [this] { return driver.work_is_left() || driver.sleeps_past_tick(); });
  }
};

// Wakes the leader so that it reads this rank's reports. If this rank is the leader, this thread tries to read them
// itself at once, which often saves a wake-up.
void Driver::after_submit() {
  if (!setup_.calls.take_news()) return;
  if (!setup_.leads) return setup_.channel.wake_leader();
  if (!setup_.wakeup.try_drive()) return setup_.wakeup.notify();
  Role role{*this};
  guarded([this] { return setup_.engine.control_step(); });
}

// For threads that are not the driver. The driver calls Engine::has_work() instead.
bool Driver::work_is_left() const { return !driven() && setup_.engine.has_work(); }

// True if no thread is the driver and the background thread would sleep past the engine's next tick.
bool Driver::sleeps_past_tick() const {
  return !driven() && setup_.engine.next_tick() < Deadline::at(sleeps_until_ns_);
}

// Calls `step`. If `step` throws an error, ends the job with that error on all ranks.
template <class Step>
bool Driver::guarded(Step&& step) {
  Failure failure;
  try {
    return step();
  } catch (const Error& error) {
    failure = {error.code(), error.what()};
  } catch (const std::exception& error) {
    failure = {ErrorCode::kInternal, std::string("internal error: ") + error.what()};
  }
  setup_.engine.give_up(failure);
  return true;
}

bool Driver::step() {
  if (g_simulated_kernel) [[unlikely]]
    g_simulated_kernel->yield();
  return guarded([this] { return setup_.engine.step(); });
}

// Runs the engine until done() or the deadline. Returns false if a signal came. The caller holds the Role.
template <class Predicate>
bool Driver::drive(Predicate&& done, Deadline deadline) {
  auto has_work = [this] { return setup_.engine.has_work(); };
  for (;;) {
    uint32_t ticket = setup_.wakeup.prepare();
    bool moved = step();
    if (done()) return true;
    if (deadline.expired()) return true;
    const Deadline tick = setup_.engine.next_tick();
    auto has_reason = [&] { return has_work() || tick.expired(); };
    if (moved || setup_.caller_spin(setup_.engine.moving(), has_reason)) continue;
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    Deadline until = std::min(deadline, setup_.engine.next_tick());
    if (!setup_.wakeup.wait(Sleeper::kCaller, ticket, has_work, until)) return false;
  }
}

void Driver::hurry() {
  setup_.calls.expedite();
  after_submit();
}

bool Driver::await(const std::function<bool()>& done, Deadline deadline) {
  while (!done()) {
    if (deadline.expired()) return false;
    const Deadline until = std::min(deadline, look());
    uint32_t ticket = setup_.calls.handles.prepare();
    if (setup_.wakeup.try_drive()) {
      bool calm = [&] {
        Role role{*this};
        const Wakeup::Muted muted(setup_.wakeup);
        return drive(done, until);
      }();
      if (!calm) return done();
    } else if (!done()) {
      if (!setup_.calls.handles.wait(ticket, until)) return done();
    }
  }
  return true;
}

// Calls probe() if a probe is due. Returns the time of the next probe.
Deadline Driver::look() {
  if (setup_.watch.patience().pause_ns == 0) return Deadline::never();
  if (Deadline::at(probe_.next_ns).expired()) probe();
  return Deadline::at(probe_.next_ns);
}

// Reports this rank's oldest bucket if it takes long. Also asks rank 0 for a sign of life.
void Driver::probe() {
  const RankWatch::Patience& patience = setup_.watch.patience();
  const std::optional<Stuck> oldest = setup_.engine.oldest_bucket();
  std::lock_guard lock(probe_.mutex);
  const int64_t now = now_ns();
  if (now < probe_.next_ns) return;
  probe_.next_ns = now + patience.pause_ns;
  if (oldest && oldest->age_ns >= patience.pause_ns) {
    setup_.calls.report(*oldest);
  }
  if (patience.asks) ask_for_life(now);
}

// Asks rank 0 for a log entry if none has come since the last probe. This finds out that rank 0 is stopped, which a
// stopped rank 0 cannot report itself.
void Driver::ask_for_life(int64_t now) {
  const RankWatch::Patience& patience = setup_.watch.patience();
  const uint64_t heard = setup_.engine.log_position();
  if (std::exchange(probe_.heard, heard) != heard) {
    probe_.asked_ns = 0;
  } else if (probe_.asked_ns == 0) {
    setup_.calls.ping();
    probe_.asked_ns = now;
    probe_.warned = false;
    after_submit();
  } else {
    const int64_t silent_ns = now - probe_.asked_ns;
    if (silent_ns < kAnswerNs && setup_.watch.why_standing().empty()) return;
    const std::string text = "no progress: " + setup_.watch.why_silent();
    if (patience.abort_ns > 0 && silent_ns >= patience.abort_ns) {
      const std::string limit = " (FARANDOLE_STALL_ABORT sets this limit)";
      setup_.calls.job.fail({ErrorCode::kStall, text + limit});
    } else if (patience.warn_ns > 0 && silent_ns >= patience.warn_ns &&
               !std::exchange(probe_.warned, true)) {
      log(LogLevel::kWarning, text);
    }
  }
}

WaitEnd Driver::wait(std::span<const Handle> wanted, Deadline deadline, Failure& failure,
                     bool endless) {
  size_t ready = 0;
  auto done = [&] { return setup_.calls.handles.finished(wanted, ready, failure); };
  if (done()) return failure ? WaitEnd::kFailed : WaitEnd::kDone;
  hurry();
  const Wanted held(setup_.engine.gpu(), wanted);
  const Handle first = wanted[ready];
  if (endless && is_main_thread()) setup_.engine.main_waits_for = first;
  RecordedWait waiting(setup_.watch.recorder(), first, setup_.calls.handles.label_of(first));
  if (await(done, deadline)) return failure ? WaitEnd::kFailed : WaitEnd::kDone;
  waiting.over = false;
  return WaitEnd::kTimeIsUp;  // or a signal came
}

std::string Driver::explain(Handle handle, Deadline deadline) {
  const uint64_t number = setup_.calls.ask(handle);
  if (number == 0) return "all ranks have submitted it, and its bytes are under way";
  after_submit();
  std::optional<std::string> text;
  auto answered = [&] {
    if (!text) text = setup_.calls.answer(number);
    return text || setup_.calls.job.broken();
  };
  while (!await(answered, deadline) && !deadline.expired()) {
  }
  if (text) return *text;
  if (setup_.calls.job.broken()) return setup_.calls.job.failure().text;
  return setup_.watch.why_silent();
}

bool Driver::done(Handle handle) {
  const bool over = setup_.calls.handles.done(handle);
  if (over) return true;
  hurry();
  look();  // the user may poll and never wait
  return false;
}

// Called only on the background thread.
void Driver::ask_scheduler() {
  ask_for_short_slice();
  ask_for_punctual_sleeps();
  if (!setup_.real_time || ask_for_real_time()) return;
  log(LogLevel::kWarning,
      "FARANDOLE_PRIORITY=realtime is not permitted here, so it has no effect; grant CAP_SYS_NICE "
      "(docker run --cap-add SYS_NICE), or raise the limit `ulimit -r` to at least 1");
}

void Driver::background() {
  ask_scheduler();
  scheduled_.count_down();
  auto has_reason = [this] { return quit_ || driven() || setup_.engine.has_work(); };
  auto wanted = [this] { return quit_ || work_is_left() || sleeps_past_tick(); };
  while (!quit_) {
    uint32_t ticket = setup_.wakeup.prepare();
    if (setup_.wakeup.try_drive()) {
      const bool moved = step();
      setup_.wakeup.stop_driving([] { return false; });
      // Polls until a caller drives. Does not drive itself, because a caller that finds another driver goes to sleep.
      if (moved || setup_.background_spin(setup_.engine.moving(), has_reason)) continue;
    }
    const Deadline tick = driven() ? Deadline::never() : setup_.engine.next_tick();
    sleeps_until_ns_ = tick.ns();
    setup_.wakeup.wait(Sleeper::kBackground, ticket, wanted, tick);
  }
}

void Driver::start() {
  thread_ = start_thread("farandole", [this] { background(); });
  if (!g_simulated_kernel) scheduled_.wait();
}

void Driver::stop() {
  quit_ = true;
  if (!thread_.joinable()) return;
  setup_.wakeup.notify_background();
  thread_.join();
  guarded([this] { return setup_.engine.say_last(); });
}

}  // namespace farandole
