// SPDX-License-Identifier: Apache-2.0
// How jobs begin and end: meeting, leaving, dying, beginning again. Every rank hears of it, nothing is left.
#include <sys/resource.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "random.h"
#include "runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;
using namespace std::chrono_literals;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

auto entries_of(const char* folder) {
  return std::ranges::distance(std::filesystem::directory_iterator(folder),
                               std::filesystem::directory_iterator());
}

// Shared mappings of ours: private ones come and go with the allocator.
size_t segments_mapped() {
  std::ifstream maps("/proc/self/maps");
  size_t n = 0;
  for (std::string line; std::getline(maps, line);) n += contains(line, "farandole-");
  return n;
}

// How often our threads have gone to sleep. (A sanitizer has one of its own, which does often.)
int64_t sleeps() {
  int64_t sum = 0;
  size_t threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    bool ours = false;
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("Name:\tfarandole")) ours = true, ++threads;
      const std::string key = "voluntary_ctxt_switches:";
      if (ours && line.starts_with(key)) sum += std::stoll(line.substr(key.size()));
    }
  }
  CHECK_EQ(threads, 2);
  return sum;
}
int64_t cpu_us() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  auto us = [](const timeval& t) { return int64_t{t.tv_sec} * 1'000'000 + t.tv_usec; };
  return us(usage.ru_utime) + us(usage.ru_stime);
}

// Calls allreduce until the job breaks.
Failure work_until_failure(TestRank& self) {
  const Deadline deadline = patience();
  while (!deadline.expired()) {
    for (size_t n : {size_t{3}, size_t{3000}, size_t{60'000}}) {
      Floats data = values_of(self.rank, n);
      try {
        Handle handle = self.submit(allreduce(data, "size " + std::to_string(n)));
        if (Failure failure = self.wait({handle})) return failure;
        self.runtime()->handles().release(handle);
        CHECK(data == sum_over(self.size, n));
      } catch (const Error& error) {
        return {error.code(), error.what()};
      }
    }
  }
  fail("the job never broke");
}

void check_broken(TestRank& self, const std::string& says) {
  Floats data(3);
  for (int i = 0; i < 2; ++i) {
    try {
      self.submit(allreduce(data));
      fail("a broken job takes calls");
    } catch (const Error& error) {
      CHECK_EQ(error.code(), ErrorCode::kPeer);
      CHECK(contains(error.what(), says));
    }
  }
}

}  // namespace

TEST(leaving_while_others_wait) {
  run_jobs({2, 3, 4}, [](TestRank& self) {
    self.check_usable();
    if (self.rank == self.size - 1) return;
    for (const char* name : {"forlorn", "forlorn", ""}) {
      Floats data(3000);
      CHECK(contains(self.fails(allreduce(data, name), ErrorCode::kPeer),
                     std::to_string(self.size - 1) + " finished normally"));
    }
  });
}

TEST(leaving_while_others_have_joined) {
  run_jobs({2, 3}, [](TestRank& self) {
    if (self.rank == 0) return;
    Floats data(3);
    for (int i = 0; i < 3; ++i) {
      self.wait({self.submit({FARANDOLE_JOIN, {}, nullptr, nullptr, ""})});
      self.fails(allreduce(data), ErrorCode::kPeer);
      std::vector<Handle> handles;
      for (int j = 0; j < 5; ++j) handles.push_back(self.submit(allreduce(data)));
      for (Handle handle : handles) CHECK_EQ(self.wait({handle}).code, ErrorCode::kPeer);
    }
  });
}

// Whoever fails takes all down: calls under way, and the next ones.
TEST(a_failing_rank_fails_all) {
  run_jobs({1, 2, 3, 4}, [](TestRank& self) {
    self.check_usable();
    if (self.rank == self.size - 1) {
      if (self.size > 1) self.lobby.await(0, static_cast<uint32_t>(self.size) - 1);
      return self.leave_failed("ValueError: no such file");
    }
    Floats data(3000);
    Handle waiting = self.submit(allreduce(data, "waiting"));
    Handle join = self.rank == 1 ? self.submit({FARANDOLE_JOIN, {}, nullptr, nullptr, ""}) : 0;
    self.lobby.tell(0);
    const Failure failure = self.wait({waiting});
    CHECK_EQ(failure.code, ErrorCode::kPeer);
    const std::string says = "rank " + std::to_string(self.size - 1) + " left: ValueError";
    CHECK(contains(failure.text, says));
    if (join) CHECK_EQ(self.wait({join}).code, ErrorCode::kPeer);
    check_broken(self, says);
  });
}

TEST(the_leader_may_fail_as_well) {
  run_jobs({2, 3}, [](TestRank& self) {
    if (self.rank == 0) return self.leave_failed("KeyError: 'x'");
    const Failure failure = work_until_failure(self);
    CHECK_EQ(failure.code, ErrorCode::kPeer);
    CHECK(contains(failure.text, "rank 0 left: KeyError"));
    check_broken(self, "rank 0 left: KeyError");
  });
}

// A broken job waits for its end without work.
TEST(a_broken_job_is_idle) {
  const auto watchful = [](Config& config) { config.stall_warn = 0.02; };
  run_job(Kind::kProcesses, 2, [](TestRank& self) {
    Floats data(3);
    if (self.rank == 1) {
      self.lobby.await(0, 1);
      return self.leave_failed("gone");
    }
    Handle handle = self.submit(allreduce(data, "waiting"));
    self.lobby.tell(0);
    CHECK_EQ(self.wait({handle}).code, ErrorCode::kPeer);
    const int64_t before = cpu_us();
    self.lobby.await(1, 1, Deadline::in(500ms));
    CHECK(cpu_us() - before < 30'000);
  }, watchful);
}

TEST(an_idle_job_sleeps) {
  run_job(Kind::kProcesses, 3, [](TestRank& self) {
    self.check_usable();
    self.lobby.barrier();
    const int64_t before = sleeps();
    self.lobby.await(0, 1, Deadline::in(2s));
    CHECK(sleeps() - before <= 2 * 2);
  });
}

// Other threads are inside submit() and wait() meanwhile, and hold on to the runtime.
TEST(leaving_with_work_under_way) {
  run_jobs({1, 2, 3}, [](TestRank& self) {
    std::vector<std::thread> threads;
    std::atomic<uint32_t> busy{0};
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&self, &busy, t, runtime = self.runtime()]() mutable {
        try {
          for (size_t i = 0;; ++i) {
            Floats data = values_of(self.rank, i % 3 * 3000);
            farandole_request request{};
            const std::string name = "of thread " + std::to_string(t);
            Ask ask = allreduce(data, name);
            request = ask.request();
            Failure failure;
            Handle handle = runtime->submit({&request, 1}).front();
            while (runtime->wait({&handle, 1}, patience(), failure) == WaitEnd::kTimeIsUp) {
            }
            if (failure) throw Error(failure.code, failure.text);
            if (i == 5) busy.fetch_add(1), futex_wake(busy, 1, kFutexAnyBit);
          }
        } catch (const Error& error) {
          CHECK(error.code() == ErrorCode::kShutdown || error.code() == ErrorCode::kPeer);
        }
        runtime.reset();
      });
    }
    for (uint32_t seen = busy; seen < 3; seen = busy) {
      futex_wait(busy, seen, kFutexAnyBit, patience());
    }
    self.leave();
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(two_threads_leave) {
  run_jobs({1, 2}, [](TestRank& self) {
    self.check_usable();
    auto runtime = self.runtime();
    std::thread other([&] { CHECK(runtime->leave(false, "", patience())); });
    self.leave();
    other.join();
    runtime.reset();
  });
}

TEST(leaving_takes_as_long_as_it_is_given) {
  run_jobs({2}, [](TestRank& self) {
    if (self.rank == 0) {
      CHECK(!self.runtime()->leave(false, "", Deadline::in(1ms)));
      CHECK(!self.runtime()->leave(false, "", Deadline::in(0ms)));
      Floats data(3);
      CHECK_THROWS(self.submit(allreduce(data)), ErrorCode::kShutdown);
      self.lobby.tell(0);
    } else {
      self.lobby.await(0, 1);
    }
  });
}

TEST(begin_and_end_again_and_again) {
  for (Kind kind : {Kind::kProcesses, Kind::kThreads}) {
    for (int ranks : {1, 2, 3}) {
      run_job(kind, ranks, [kind](TestRank& self) {
        ptrdiff_t fds = 0;
        ptrdiff_t threads = 0;
        for (int i = 0; i < 20; ++i) {
          self.check_usable();
          self.leave();
          CHECK(!self.up());
          self.lobby.barrier();
          if (kind == Kind::kProcesses) {
            if (i == 0) {
              fds = entries_of("/proc/self/fd");
              threads = entries_of("/proc/self/task");
            }
            CHECK_EQ(entries_of("/proc/self/fd"), fds);
            CHECK_EQ(entries_of("/proc/self/task"), threads);
            CHECK_EQ(segments_mapped(), 0);
          }
          self.start();
        }
      });
    }
  }
}

TEST(a_rank_that_never_comes) {
  Lobby lobby(3);
  run_in_forks(3, [&](int rank) {
    Config config = test_config();
    config.init_timeout = 0.3;
    Door door(config);
    std::vector<Card> cards = lobby.exchange(rank, 0, door.card());
    if (rank == 2) return lobby.await(0, 2);
    TestRank self(lobby, rank, config);
    const int64_t before = now_ns();
    try {
      self.enter(std::move(door), cards);
      fail("the job began without rank 2");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kStall || error.code() == ErrorCode::kPeer);
    }
    CHECK(now_ns() - before < 2'000'000'000);
    lobby.tell(0);
  });
}

TEST(another_build_is_refused) {
  Lobby lobby(2);
  run_in_forks(2, [&](int rank) {
    Door door(test_config());
    Card card = Card::decode(door.card());
    if (rank == 1) card.build += " of yesterday";
    std::vector<Card> cards = lobby.exchange(rank, 0, card.encode());
    TestRank self(lobby, rank, test_config());
    try {
      self.enter(std::move(door), cards);
      fail("two builds met");
    } catch (const Error& error) {
      CHECK_EQ(error.code(), ErrorCode::kMismatch);
      CHECK(contains(error.what(), "of yesterday' on rank 1"));
    }
  });
}

namespace {

// Sends this process SIGKILL after so many microseconds, whatever it does then.
void die_in(uint64_t us) {
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer;
  CHECK_EQ(timer_create(CLOCK_MONOTONIC, &event, &timer), 0);
  itimerspec when{};
  when.it_value.tv_nsec = static_cast<long>(us * 1000 + 1);
  CHECK_EQ(timer_settime(timer, 0, &when, nullptr), 0);
}

void kill_one_of(int ranks, uint64_t seed) {
  Random random(seed);
  const int victim = static_cast<int>(random.below(static_cast<uint64_t>(ranks)));
  const uint64_t us = random.below(6000);
  Lobby lobby(ranks);
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid > 0) {
      children.push_back(pid);
      continue;
    }
    try {
      TestRank self(lobby, rank, test_config());
      self.start();
      self.check_usable();
      if (rank == victim) die_in(us);
      const Failure failure = work_until_failure(self);
      lobby.time_of(rank) = now_ns();
      CHECK_EQ(failure.code, ErrorCode::kPeer);
      CHECK(contains(failure.text, "rank " + std::to_string(victim)));
      check_broken(self, "rank " + std::to_string(victim));
      self.leave();
      _exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "seed %lu rank %d: %s\n", static_cast<unsigned long>(seed), rank, error.what());
    }
    _exit(1);
  }
  int64_t died = 0;
  for (int rank : {victim, 0, 1, 2, 3}) {
    if (rank >= ranks || (rank == victim && died != 0)) continue;
    int status = 0;
    CHECK_EQ(waitpid(children[static_cast<size_t>(rank)], &status, 0),
             children[static_cast<size_t>(rank)]);
    if (rank == victim) {
      CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
      died = now_ns();
      continue;
    }
    CHECK_EQ(status, 0);
    CHECK(lobby.time_of(rank) - died < 2'000'000'000);
  }
  CHECK_EQ(waitpid(-1, nullptr, WNOHANG), -1);  // none is left
}

}  // namespace

TEST(a_killed_rank_fails_all_others_soon) {
  for (uint64_t seed = 1; seed <= 20; ++seed) kill_one_of(2 + static_cast<int>(seed % 3), seed);
}
