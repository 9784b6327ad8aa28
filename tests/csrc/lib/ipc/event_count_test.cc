// SPDX-License-Identifier: Apache-2.0
// EventCount on real futexes: threads, forked processes, deadlines. The proof of its protocol is
// in event_protocol_test.cc.
#include "lib/ipc/event_count.h"

#include <sched.h>

#include <functional>
#include <thread>

#include "check.h"
#include "lib/ipc/segment.h"

namespace farandole {
namespace {

using namespace std::chrono_literals;

constexpr uint32_t kRounds = 20'000;

bool nothing() { return false; }
Deadline patience() { return Deadline::in(60s); }

// Zeroed memory has no bells of its own: the sleepers sleep on the word.
struct Sleepers {
  EventCount count;
  const Bells* bells;
  Wakeup operator()() { return bells ? Wakeup(count, *bells) : Wakeup(count); }
};

struct Events : EventCount, Wakeup {
  Events() : Wakeup(static_cast<EventCount&>(*this)) {}
};

struct Side {
  Sleepers events{};
  std::atomic<uint32_t> received{0};
};

struct Table {
  Side sides[2];
};

template <class T>
T& zeroed(const Segment& segment) {
  CHECK(segment.size() >= sizeof(T));
  return *reinterpret_cast<T*>(segment.data());
}

// Returns when `side` has received `wanted` balls.
void await_ball(Side& side, Sleeper sleeper, uint32_t wanted) {
  const auto arrived = [&] { return side.received.load() >= wanted; };
  while (!arrived()) {
    CHECK(side.events().wait(sleeper, side.events().prepare(), arrived, patience()));
  }
}

void play(Table& table, int own, Sleeper sleeper) {
  for (uint32_t round = 1; round <= kRounds; ++round) {
    if (own == 1) await_ball(table.sides[1], sleeper, round);
    table.sides[1 - own].received.fetch_add(1);
    table.sides[1 - own].events().notify();
    if (own == 0) await_ball(table.sides[0], sleeper, round);
  }
  CHECK_EQ(rescued_wakeups(), 0);
}

// A rank with a caller and a background thread: both look at one counter of work.
struct Driven {
  Sleepers events{};
  std::atomic<uint32_t> published{0};
  std::atomic<uint32_t> done{0};  // changed by the driver only

  bool has_work() const { return published.load() != done.load(); }
  bool do_work() { return has_work() && (done.fetch_add(1), true); }
};

void drive_background(Driven& rank, uint32_t all) {
  const auto has_work = [&] { return rank.has_work(); };
  while (rank.done.load() < all) {
    if (rank.events().try_drive()) {
      while (rank.do_work()) rank.done.notify_all();  // a caller may wait for this piece
      rank.events().stop_driving(has_work);
    }
    if (rank.done.load() == all) break;
    rank.events().wait(
        Sleeper::kBackground, rank.events().prepare(),
        [&] { return rank.done.load() == all || (rank.has_work() && !rank.events().driven()); },
        patience());
  }
}

// One blocking call: returns when `wanted` pieces are done.
void call(Driven& rank, uint32_t wanted) {
  const auto has_work = [&] { return rank.has_work(); };
  const auto done = [&] { return rank.done.load() >= wanted; };
  for (uint32_t before = rank.done.load(); before < wanted; before = rank.done.load()) {
    if (!rank.events().try_drive()) {
      rank.done.wait(before);  // the background thread drives
      continue;
    }
    while (!done()) {
      const uint32_t ticket = rank.events().prepare();
      if (rank.do_work()) continue;
      rank.events().wait(Sleeper::kCaller, ticket, has_work, patience());
    }
    return rank.events().stop_driving(has_work);
  }
}

// Publishes all work, a piece at a time: as a full ring would hold it back.
void publish_all(Driven& rank) {
  for (uint32_t i = 1; i <= kRounds; ++i) {
    rank.published.fetch_add(1);
    rank.events().notify();
    while (rank.done.load() + 8 < i) sched_yield();
  }
}

// Its own threads share the work that a peer publishes.
void do_all(Driven& rank) {
  std::thread background([&] { drive_background(rank, kRounds); });
  for (uint32_t wanted = 5; wanted <= kRounds; wanted += 10) call(rank, wanted);
  background.join();
  CHECK_EQ(rescued_wakeups(), 0);
}

}  // namespace

// The sleepers of one process that sleep in its Poller.
struct Bell {
  Poller poller;
  Bells bells{{poller.bell(Poller::kDriver), poller.bell(Poller::kOther)}, &poller};
};

TEST(threads_play_ping_pong_with_bells_and_without) {
  for (bool rings : {false, true}) {
    Table table;
    Bell bells[2];
    for (int i = 0; i < 2 && rings; ++i) table.sides[i].events.bells = &bells[i].bells;
    std::thread peer([&] { play(table, 1, Sleeper::kBackground); });
    play(table, 0, Sleeper::kCaller);
    peer.join();
  }
}

TEST(a_caller_and_a_background_thread_share_work_with_bells) {
  Driven rank;
  const Bell bell;
  rank.events.bells = &bell.bells;
  std::thread peer([&] { publish_all(rank); });
  do_all(rank);
  peer.join();
  CHECK_EQ(rank.done.load(), kRounds);
}

TEST(forked_processes_play_ping_pong) {
  const Segment segment = Segment::create("ping-pong", sizeof(Table), true);
  Table& table = zeroed<Table>(segment);
  check::run_in_forks(2, [&](int own) { play(table, own, Sleeper::kCaller); });
  CHECK_EQ(table.sides[0].received.load(), kRounds);
  CHECK_EQ(table.sides[1].received.load(), kRounds);
}

TEST(a_caller_and_a_background_thread_share_the_work_of_a_forked_peer) {
  const Segment segment = Segment::create("driven", sizeof(Driven), true);
  Driven& rank = zeroed<Driven>(segment);
  check::run_in_forks(2, [&](int own) { own == 1 ? publish_all(rank) : do_all(rank); });
  CHECK_EQ(rank.done.load(), kRounds);
}

TEST(while_somebody_drives_the_background_thread_sleeps_on) {
  constexpr uint32_t kPieces = 1000;
  Driven rank;
  std::atomic<bool> flag_is_set{false};
  const auto has_work = [&] { return rank.has_work(); };
  CHECK(rank.events().try_drive());
  std::thread background([&] {
    while (rank.done.load() <= kPieces) {
      const auto look = [&] {
        flag_is_set.store(true);
        flag_is_set.notify_one();
        return rank.has_work() && !rank.events().driven();
      };
      rank.events().wait(Sleeper::kBackground, rank.events().prepare(), look, patience());
      if (!rank.events().try_drive()) continue;
      while (rank.do_work()) continue;
      rank.events().stop_driving(has_work);
    }
  });
  flag_is_set.wait(false);
  CHECK(!rank.events().try_drive());
  const uint32_t sequence = rank.events().prepare();
  for (uint32_t i = 0; i < kPieces; ++i) {
    rank.published.fetch_add(1);
    rank.events().notify();
  }
  CHECK_EQ(rank.events().prepare(), sequence);  // nobody was to be woken
  while (rank.do_work()) continue;
  rank.published.fetch_add(1);
  rank.events().stop_driving(has_work);
  background.join();
  CHECK_EQ(rank.done.load(), kPieces + 1);
  CHECK_EQ(rescued_wakeups(), 0);
}

TEST(notify_wakes_nobody_without_a_sleeper) {
  Events events;
  const uint32_t ticket = events.prepare();
  events.notify();
  events.notify_background();
  CHECK_EQ(events.prepare(), ticket);
}

TEST(a_wait_ends_at_its_deadline) {
  Events events;
  const int64_t start = now_ns();
  CHECK(events.wait(Sleeper::kCaller, events.prepare(), nothing, Deadline::in(20ms)));
  CHECK(now_ns() - start >= 20'000'000);
}

TEST(a_long_wait_returns_within_a_second_or_so_to_look_again) {
  Events events;
  const int64_t start = now_ns();
  CHECK(events.wait(Sleeper::kBackground, events.prepare(), nothing, Deadline::never()));
  CHECK(now_ns() - start >= 900'000'000);
  CHECK_EQ(rescued_wakeups(), 0);
}

TEST(work_means_no_sleep) {
  Events events;
  const int64_t start = now_ns();
  CHECK(events.wait(Sleeper::kCaller, events.prepare(), [] { return true; }, Deadline::never()));
  CHECK(now_ns() - start < 900'000'000);
}

TEST(an_old_ticket_means_no_sleep) {
  Events events;
  const uint32_t ticket = events.prepare();
  bool first = true;
  const auto notified_meanwhile = [&] {
    if (std::exchange(first, false)) events.notify();  // the flag is set by now
    return false;
  };
  const int64_t start = now_ns();
  CHECK(events.wait(Sleeper::kCaller, ticket, notified_meanwhile, patience()));
  CHECK(now_ns() - start < 900'000'000);
  CHECK(events.prepare() != ticket);
}

TEST(work_that_nobody_announced_is_counted) {
  check::run_in_fork([] {
    Events events;
    int looks = 0;
    const auto appears_silently = [&] { return ++looks > 1; };
    CHECK(events.wait(Sleeper::kCaller, events.prepare(), appears_silently, Deadline::in(1ms)));
    CHECK_EQ(rescued_wakeups(), 1);
  });
}

}  // namespace farandole
