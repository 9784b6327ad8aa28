// SPDX-License-Identifier: Apache-2.0
#include "runtime/driver.h"

#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "lib/os/thread.h"

namespace farandole {

// Of a thread that has it. Gives it back whatever happens, and hands on what is left to do, also what
// will be to do at a time that no bell rings for.
struct Driver::Role {
  Driver& driver;
  ~Role() {
    driver.setup_.bell.stop_driving(
        [this] { return driver.work_is_left() || driver.sleeps_past_tick(); });
  }
};

// Reports lie in the leader's ring. The leader itself looks at them at once: often it need not wake its
// background thread then.
void Driver::after_submit() {
  if (!setup_.calls.reporter.take_news()) return;
  if (!setup_.leads) return setup_.channel.ring_leader();
  if (!setup_.bell.try_drive()) return setup_.bell.notify();
  Role role{*this};
  guarded([this] { return setup_.engine.control_step(); });
}

// For whoever does not drive: a driver looks by itself.
bool Driver::work_is_left() const { return !setup_.bell.driven() && setup_.engine.has_work(); }

// Nobody drives, and the background thread is to sleep longer than it may.
bool Driver::sleeps_past_tick() const {
  return !setup_.bell.driven() && setup_.engine.next_tick() < Deadline::at(sleeps_until_ns_);
}

// The engine's errors are the job's: every rank must hear of them.
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
  return guarded([this] { return setup_.engine.step(); });
}

// Drives until done() or the deadline; false: a signal came. The caller has the driver's role.
template <class Predicate>
bool Driver::drive(Predicate&& done, Deadline deadline) {
  auto has_work = [this] { return setup_.engine.has_work(); };
  for (;;) {
    uint32_t ticket = setup_.bell.prepare();
    bool moved = step();
    if (done()) return true;
    if (moved || setup_.spin(setup_.engine.moving(), has_work)) continue;
    if (deadline.expired()) return true;
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    Deadline until = std::min(deadline, setup_.engine.next_tick());
    if (setup_.bell.wait(Sleeper::kCaller, ticket, has_work, until) == WaitResult::kInterrupted) {
      return false;
    }
  }
}

bool Driver::await(const std::function<bool()>& done, Deadline deadline) {
  while (!done()) {
    if (deadline.expired()) return false;
    uint32_t ticket = setup_.calls.handles.prepare();
    if (setup_.bell.try_drive()) {
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
      "CAP_SYS_NICE "
      "(docker run --cap-add SYS_NICE) or a limit of at least 1 in `ulimit -r`");
}

void Driver::background() {
  ask_scheduler();
  scheduled_.count_down();
  auto has_work = [this] { return setup_.engine.has_work(); };
  auto wanted = [this] { return quit_ || work_is_left() || sleeps_past_tick(); };
  while (!quit_) {
    uint32_t ticket = setup_.bell.prepare();
    bool moved = false;
    if (setup_.bell.try_drive()) {
      moved = step() || setup_.spin(setup_.engine.moving(), has_work);
      setup_.bell.stop_driving([] { return false; });
    }
    if (moved) continue;
    const Deadline tick = setup_.bell.driven() ? Deadline::never() : setup_.engine.next_tick();
    sleeps_until_ns_ = tick.ns();
    setup_.bell.wait(Sleeper::kBackground, ticket, wanted, tick);
  }
}

void Driver::start() {
  thread_ = start_thread("farandole", [this] { background(); });
  scheduled_.wait();
}

void Driver::stop() {
  quit_ = true;
  if (!thread_.joinable()) return;
  setup_.bell.notify_background();
  thread_.join();
  guarded([this] { return setup_.engine.say_last(); });
}

}  // namespace farandole
