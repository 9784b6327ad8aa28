// SPDX-License-Identifier: Apache-2.0
#include "runtime/driver.h"

#include <exception>

#include "base/error.h"
#include "base/logging.h"
#include "lib/os/thread.h"

namespace farandole {

// Held by the thread that drives. Its destructor gives the role back and wakes whoever should drive now: for
// work that is left, or for a tick earlier than the background thread's wake-up time.
struct Driver::Role {
  Driver& driver;
  ~Role() {
    driver.setup_.wakeup.stop_driving(
        [this] { return driver.work_is_left() || driver.sleeps_past_tick(); });
  }
};

// Non-leaders wake the leader to read their reports. The leader reads its own at once, which often saves
// waking its background thread.
void Driver::after_submit() {
  if (!setup_.calls.reporter.take_news()) return;
  if (!setup_.leads) return setup_.channel.wake_leader();
  if (!setup_.wakeup.try_drive()) return setup_.wakeup.notify();
  Role role{*this};
  guarded([this] { return setup_.engine.control_step(); });
}

// For threads that don't drive; the driver checks has_work() itself.
bool Driver::work_is_left() const { return !setup_.wakeup.driven() && setup_.engine.has_work(); }

// Nobody drives, and the background thread would sleep past the engine's next tick, or the heap's.
bool Driver::sleeps_past_tick() const {
  const Deadline until = Deadline::at(sleeps_until_ns_);
  return !setup_.wakeup.driven() && (setup_.engine.next_tick() < until || heap_.due() < until);
}

// An exception from the engine ends the job: reports it to all ranks.
template <class Step>
bool Driver::guarded(Step&& step) {
  Failure failure;
  try {
    return step();
  } catch (const Error& error) {
    failure = {error.code(), error.what()};
  } catch (const std::exception& error) {
    failure = {ErrorCode::kInternal, std::string("out of control: ") + error.what()};
  }
  if (!setup_.calls.job.broken()) setup_.calls.report(Leave{true, failure.text});
  setup_.engine.give_up(failure);
  return true;
}

bool Driver::step() {
  const bool moved = guarded([this] { return setup_.engine.step(); });
  if (moved) heap_.used();
  return moved;
}

// Drives until done() or the deadline; false: a signal came. The caller must hold the role.
template <class Predicate>
bool Driver::drive(Predicate&& done, Deadline deadline) {
  auto has_work = [this] { return setup_.engine.has_work(); };
  for (;;) {
    uint32_t ticket = setup_.wakeup.prepare();
    bool moved = step();
    if (done()) return true;
    if (moved || setup_.spin(setup_.engine.moving(), has_work)) continue;
    if (deadline.expired()) return true;
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    Deadline until = std::min(deadline, setup_.engine.next_tick());
    if (!setup_.wakeup.wait(Sleeper::kCaller, ticket, has_work, until)) return false;
  }
}

bool Driver::await(const std::function<bool()>& done, Deadline deadline) {
  while (!done()) {
    if (deadline.expired()) return false;
    uint32_t ticket = setup_.calls.handles.prepare();
    if (setup_.wakeup.try_drive()) {
      bool calm = [&] {
        Role role{*this};
        return drive(done, deadline);
      }();
      if (!calm) return done();
    } else if (!done()) {
      if (!setup_.calls.handles.wait(ticket, deadline)) return done();
    }
  }
  return true;
}

// For the background thread.
void Driver::ask_scheduler() {
  ask_for_short_slice();
  if (!setup_.real_time || ask_for_real_time()) return;
  log(LogLevel::kWarning,
      "FARANDOLE_PRIORITY=realtime is not permitted here, and changes nothing; it needs "
      "CAP_SYS_NICE (docker run --cap-add SYS_NICE) or a limit of at least 1 in `ulimit -r`");
}

void Driver::background() {
  ask_scheduler();
  scheduled_.count_down();
  auto has_work = [this] { return setup_.engine.has_work(); };
  auto wanted = [this] { return quit_ || work_is_left() || sleeps_past_tick(); };
  while (!quit_) {
    uint32_t ticket = setup_.wakeup.prepare();
    bool moved = false;
    if (setup_.wakeup.try_drive()) {
      moved = step() || setup_.spin(setup_.engine.moving(), has_work);
      setup_.wakeup.stop_driving([] { return false; });
    }
    if (moved) continue;
    heap_.trim();
    const Deadline tick = std::min(
        heap_.due(), setup_.wakeup.driven() ? Deadline::never() : setup_.engine.next_tick());
    sleeps_until_ns_ = tick.ns();
    setup_.wakeup.wait(Sleeper::kBackground, ticket, wanted, tick);
  }
}

void Driver::start() {
  thread_ = start_thread("farandole", [this] { background(); });
  scheduled_.wait();
}

void Driver::stop() {
  quit_ = true;
  if (!thread_.joinable()) return;
  setup_.wakeup.notify_background();
  thread_.join();
  guarded([this] { return setup_.engine.say_last(); });
}

}  // namespace farandole
