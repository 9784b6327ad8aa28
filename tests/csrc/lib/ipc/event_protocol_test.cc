// SPDX-License-Identifier: Apache-2.0
// Proves by exhaustion that event_protocol.h loses no wake-up, and that the checker would notice.
#include "lib/ipc/event_protocol.h"

#include <cstdio>

#include "check.h"
#include "lib/ipc/interleavings.h"

namespace farandole {
namespace {

using namespace event_protocol;

// The shared memory, the kernel's queue of sleepers, and work that is published and done.
struct Shared {
  uint32_t word = 0;
  uint32_t flags = 0;
  uint32_t asleep = 0;    // bits of those inside futex_wait
  uint32_t buffered = 0;  // published, but still in the store buffer of its processor
  uint32_t published = 0;
  uint32_t done = 0;
  uint32_t needless = 0;  // wake-ups of the background thread while the rank was driven
};

using Steps = check::Steps<Shared>;
using Interleavings = check::Interleavings<Shared>;
using Program = Interleavings::Program;

// What event_protocol.h runs on here.
class Model {
 public:
  explicit Model(Steps& steps) : steps_(steps) {}

  uint32_t load_word() {
    return steps_.step([](Shared& s) { return s.word; });
  }
  uint32_t load_flags() {
    return steps_.step([](Shared& s) { return s.flags; });
  }
  bool replace_flags(uint32_t& expected, uint32_t desired) {
    const uint32_t seen = steps_.step([=](Shared& s) {
      const uint32_t before = s.flags;
      if (before != expected) return before;
      const bool background = (before & ~desired & kBackgroundAsleep) != 0;
      if (background && (before & kDriven) != 0) ++s.needless;
      s.flags = desired;
      return before;
    });
    if (seen == expected) return true;
    expected = seen;
    return false;
  }
  uint32_t set_flags(uint32_t bits) {
    return steps_.step([=](Shared& s) { return std::exchange(s.flags, s.flags | bits) & bits; });
  }
  void clear_flags(uint32_t bits) {
    change([=](Shared& s) { s.flags &= ~bits; });
  }
  void bump() {
    change([](Shared& s) { ++s.word; });
  }
  void wake(uint32_t bits) {
    change([=](Shared& s) { s.asleep &= ~bits; });
  }
  FutexResult sleep(uint32_t ticket, uint32_t bits, Deadline) {
    const uint32_t entered = steps_.step([=](Shared& s) -> uint32_t {
      if (s.word != ticket) return 0;
      s.asleep |= bits;
      return 1;
    });
    if (entered == 0) return FutexResult::kChanged;
    steps_.await([=](const Shared& s) { return (s.asleep & bits) == 0; });
    return FutexResult::kWoken;
  }
  static Deadline grace() { return Deadline::never(); }
  static void rescued() {}

  bool has_work() {
    return test([](Shared& s) { return s.published != s.done; });
  }
  bool done(uint32_t wanted) {
    return test([=](Shared& s) { return s.done >= wanted; });
  }
  void await_done(uint32_t wanted) {
    steps_.await([=](const Shared& s) { return s.done >= wanted; });
  }
  bool driven() { return (load_flags() & kDriven) != 0; }
  void publish() {
    change([](Shared& s) { ++s.published; });
  }
  void publish_into_store_buffer() {
    change([](Shared& s) { ++s.buffered; });
  }
  bool do_work() {
    return test([](Shared& s) { return s.published != s.done && ++s.done; });
  }
  void restart(uint32_t memory) { steps_.restart(static_cast<uint8_t>(memory)); }
  uint32_t memory() const { return steps_.memory(); }

 private:
  template <class Change>
  void change(Change&& change) {
    steps_.step([&](Shared& s) -> uint32_t { return change(s), 0; });
  }
  template <class Test>
  bool test(Test&& test) {
    return steps_.step([&](Shared& s) -> uint32_t { return test(s); }) != 0;
  }

 private:
  Steps& steps_;
};

void notify_any(Model& model) { notify(model, kAnySleeper); }

Program notifier(uint32_t times, void (*notify_peer)(Model&) = notify_any) {
  return {[=](Steps& steps) {
    Model model(steps);
    model.publish();
    notify_peer(model);
    if (model.memory() + 1 < times) model.restart(model.memory() + 1);
  }};
}

FutexResult protocol_sleep(Model& model, uint32_t sleeper, uint32_t ticket,
                           const std::function<bool()>& has_work) {
  return event_protocol::sleep(model, sleeper, ticket, has_work, Deadline::never());
}

void protocol_stop(Model& model) {
  stop_driving(model, [&] { return model.has_work(); });
}

constexpr uint8_t kArriving = 0;  // what caller() and background() remember
constexpr uint8_t kDriving = 1;

struct CallerParts {
  decltype(&protocol_sleep) sleep = protocol_sleep;
  decltype(&protocol_stop) stop = protocol_stop;
};

// A blocking call: drives until `wanted` pieces of work are done, then leaves. If another thread drives, it
// sleeps until a piece is done, as on the futex of Handles.
Program caller(uint32_t wanted, const CallerParts& parts = {}, uint8_t start = kArriving) {
  const auto body = [=](Steps& steps) {
    Model model(steps);
    if (model.memory() == kArriving) {
      if (try_drive(model)) model.restart(kDriving);
      return model.await_done(wanted);
    }
    if (model.done(wanted)) return parts.stop(model);
    if (model.do_work()) model.restart(kDriving);
    parts.sleep(model, kCallerAsleep, model.load_word(), [&] { return model.has_work(); });
    model.restart(kDriving);
  };
  return {body, start};
}

// The rank's own thread, for ever.
Program background() {
  return {[](Steps& steps) {
    Model model(steps);
    if (model.memory() == kArriving) {
      if (try_drive(model)) model.restart(kDriving);
    } else if (model.do_work()) {
      model.restart(kDriving);
    } else {
      protocol_stop(model);
    }
    protocol_sleep(model, kBackgroundAsleep, model.load_word(),
                   [&] { return model.has_work() && !model.driven(); });
    model.restart(kArriving);
  }};
}

// A signal wakes the sleepers of `kind` once, at any moment.
Program signal(uint32_t kind) {
  return {[=](Steps& steps) { Model(steps).wake(kind); }};
}

// True if in every order all work is done at the end, and the background thread was left alone.
bool always_good(const char* name, uint32_t all, std::vector<Program> programs,
                 const Shared& start = {}) {
  const Interleavings explored(start, std::move(programs),
                               [=](const Shared& s) { return s.done == all && s.needless == 0; });
  std::fprintf(stderr, "     %s: %zu states, %zu ends\n", name, explored.states(), explored.ends());
  CHECK(explored.ends() > 0);
  return !explored.bad();
}

void bump_first(Model& model) {
  model.bump();
  const uint32_t sleeper = take_sleeper(model, kAnySleeper);
  if (sleeper != 0) model.wake(sleeper);
}

FutexResult flag_last(Model& model, uint32_t sleeper, uint32_t ticket,
                      const std::function<bool()>& has_work) {
  if (has_work()) return FutexResult::kChanged;
  model.set_flags(sleeper);
  const FutexResult result = model.sleep(ticket, sleeper, Deadline::never());
  model.clear_flags(sleeper);
  return result;
}

void look_then_stop(Model& model) {
  if (model.has_work()) notify_any(model);
  model.clear_flags(kDriven);
}

void leave_without_looking(Model& model) { model.clear_flags(kDriven); }

// A store weaker than seq_cst: the notifier reads the flags before others see its store.
void weak_publisher(Steps& steps) {
  Model model(steps);
  model.publish_into_store_buffer();
  notify_any(model);
}

void store_buffer(Steps& steps) {
  steps.await([](const Shared& s) { return s.buffered > 0; });
  steps.step([](Shared& s) { return s.published += std::exchange(s.buffered, 0); });
}

}  // namespace

TEST(a_caller_loses_no_wake_up) {
  CHECK(always_good("one notifier", 3, {notifier(3), caller(3)}));
  CHECK(always_good("two notifiers", 3, {notifier(2), notifier(1), caller(3)}));
  CHECK(
      always_good("and a signal", 2, {notifier(1), notifier(1), caller(2), signal(kCallerAsleep)}));
}

TEST(the_background_thread_loses_no_wake_up) {
  CHECK(always_good("one notifier", 3, {notifier(3), background()}));
  CHECK(always_good("two notifiers", 3, {notifier(2), notifier(1), background()}));
  CHECK(always_good("and a signal", 2,
                    {notifier(1), notifier(1), background(), signal(kBackgroundAsleep)}));
}

TEST(a_caller_and_the_background_thread_lose_no_wake_up) {
  CHECK(always_good("one piece", 1, {notifier(1), caller(1), background()}));
  CHECK(always_good("hand-over", 2, {notifier(2), caller(1), background()}));
  CHECK(always_good("two notifiers, caller drives", 2,
                    {notifier(1), notifier(1), caller(1, {}, kDriving), background()},
                    {.flags = kDriven}));
}

TEST(the_checker_catches_what_differs_from_the_protocol) {
  CHECK(!always_good("a bump before the flag is taken", 3,
                     {notifier(2, bump_first), notifier(1, bump_first), caller(3)}));
  CHECK(!always_good("a sleeper that does not look again", 1,
                     {notifier(1), caller(1, {.sleep = flag_last})}));
  CHECK(!always_good("a driver that looks before it stops", 2,
                     {notifier(2), caller(1, {.stop = look_then_stop}), background()}));
  CHECK(!always_good("a driver that leaves with a wake-up", 2,
                     {notifier(2), caller(1, {.stop = leave_without_looking}), background()}));
  CHECK(!always_good("a publishing store that is too weak", 1,
                     {{weak_publisher}, {store_buffer}, caller(1)}));
}

}  // namespace farandole
