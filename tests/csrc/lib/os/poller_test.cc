// SPDX-License-Identifier: Apache-2.0
// Sleeping on sockets and bells. event_count_test.cc has the threads that wake each other by bells.
#include "lib/os/poller.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <chrono>
#include <utility>

#include "check.h"

namespace farandole {
namespace {

using namespace std::chrono_literals;

Deadline now() { return Deadline::at(0); }
Deadline patience() { return Deadline::in(60s); }

struct Pair {
  Fd near, far;
  Pair() {
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    near = Fd(ends[0]);
    far = Fd(ends[1]);
  }
  void send() const { CHECK_EQ(::send(far.get(), "x", 1, MSG_NOSIGNAL), 1); }
  void drain() const {
    char byte;
    while (recv(near.get(), &byte, 1, MSG_DONTWAIT) > 0) continue;
  }
};

// A socket that can be written counts as changed once.
void watch(Poller& poller, const Pair& pair, bool* changed = nullptr) {
  CHECK(poller.watch(pair.near.get(), changed));
  poller.collect();
  poller.take_news();
  if (changed) *changed = false;
}

}  // namespace

TEST(bytes_wake_the_driver_and_mark_their_socket) {
  Poller poller;
  const Pair quiet, busy;
  bool quiet_changed = false, busy_changed = false;
  watch(poller, quiet, &quiet_changed);
  watch(poller, busy, &busy_changed);
  CHECK(!poller.ready());
  busy.send();
  CHECK(poller.ready());
  CHECK(poller.sleep(Poller::kDriver, patience()) == FutexResult::kWoken);
  poller.collect();
  CHECK(busy_changed && !quiet_changed && !poller.has_news());
  CHECK(!poller.ready());  // once, though nobody has read the byte
  CHECK(poller.sleep(Poller::kDriver, now()) == FutexResult::kTimedOut);
  busy.send();
  CHECK(poller.ready());
}

TEST(the_other_sleeper_is_woken_once_by_what_nobody_collects) {
  Poller poller;
  const Pair pair;
  watch(poller, pair);
  CHECK(poller.sleep(Poller::kOther, now()) == FutexResult::kTimedOut);
  for (int i = 0; i < 3; ++i) {
    pair.send();
    CHECK(poller.sleep(Poller::kOther, patience()) == FutexResult::kWoken);
    CHECK(poller.sleep(Poller::kOther, now()) == FutexResult::kTimedOut);
    CHECK(poller.ready());
  }
  poller.collect();
  CHECK(poller.has_news());
  poller.take_news();
  CHECK(!poller.has_news());
  pair.drain();
  pair.send();
  CHECK(poller.sleep(Poller::kOther, patience()) == FutexResult::kWoken);
}

TEST(muted_changes_wake_the_driver_only_until_they_are_no_longer_muted) {
  Poller poller;
  const Pair pair;
  watch(poller, pair);
  poller.mute(true);
  pair.send();
  CHECK(poller.sleep(Poller::kOther, now()) == FutexResult::kTimedOut);
  CHECK(poller.sleep(Poller::kDriver, patience()) == FutexResult::kWoken);
  poller.mute(false);
  CHECK(poller.sleep(Poller::kOther, patience()) == FutexResult::kWoken);
}

TEST(an_end_and_new_room_are_changes) {
  Poller poller;
  Pair pair;
  bool changed = false;
  watch(poller, pair, &changed);
  while (::send(pair.near.get(), "0123456789", 10, MSG_NOSIGNAL) > 0) continue;
  poller.collect();
  changed = false;
  char bytes[4096];
  while (recv(pair.far.get(), bytes, sizeof bytes, MSG_DONTWAIT) > 0) continue;
  poller.collect();
  CHECK(std::exchange(changed, false));
  pair.far.reset();
  poller.collect();
  CHECK(changed);
}

TEST(a_bell_wakes_its_own_sleeper) {
  Poller poller;
  ring_bell(poller.bell(Poller::kOther));
  CHECK(poller.sleep(Poller::kDriver, now()) == FutexResult::kTimedOut);
  CHECK(poller.sleep(Poller::kOther, patience()) == FutexResult::kWoken);
  CHECK(poller.sleep(Poller::kOther, now()) == FutexResult::kTimedOut);
  CHECK(!poller.ready());
}

TEST(a_signal_handler_ends_a_sleep) {
  Poller poller;
  struct sigaction action{}, before{};
  action.sa_handler = [](int) {};
  action.sa_flags = SA_RESTART;
  sigaction(SIGALRM, &action, &before);
  const itimerval often{{0, 2000}, {0, 2000}}, off{};
  setitimer(ITIMER_REAL, &often, nullptr);
  CHECK(poller.sleep(Poller::kDriver, Deadline::never()) == FutexResult::kInterrupted);
  setitimer(ITIMER_REAL, &off, nullptr);
  sigaction(SIGALRM, &before, nullptr);
}

}  // namespace farandole
