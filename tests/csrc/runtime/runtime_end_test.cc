// SPDX-License-Identifier: Apache-2.0
// Leaving, failing and dying: every rank hears of it, and soon.
#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <span>

#include "runtime/runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;
using namespace std::chrono_literals;

namespace {

int64_t cpu_us() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  auto us = [](const timeval& t) { return int64_t{t.tv_sec} * 1'000'000 + t.tv_usec; };
  return us(usage.ru_utime) + us(usage.ru_stime);
}

// Sanitizers are told by the function that starts them.
void skip_under(std::initializer_list<const char*> sanitizers, const std::string& reason) {
  for (const char* sanitizer : sanitizers) {
    if (dlsym(RTLD_DEFAULT, sanitizer)) skip(reason);
  }
}

}  // namespace

// Ranks 1 and 3 leave at once; only when that is known, the others form a set, use it and end it.
TEST(members_form_a_set_when_all_others_have_left) {
  run_jobs({4}, [](TestRank& self) {
    if (self.rank % 2 == 1) return;
    Floats data = values_of(self.rank, 5000);
    while (!contains(self.fails(allreduce(data, "of all"), ErrorCode::kPeer), "ranks 1, 3 ")) {
    }
    Ask form{FARANDOLE_ADD_SET, {0, 2}, nullptr, nullptr, "members"};
    form.by_members = true;
    Ask sum = allreduce(data);
    sum.set = self.set_of(self.submit(form));
    self.run(sum);
    Floats expected = values_of(0, data.size());
    const Floats others = values_of(2, data.size());
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += others[i];
    CHECK(data == expected);
    Ask end = form;
    end.op = FARANDOLE_REMOVE_SET;
    end.name = "their end";
    end.root = sum.set;
    self.run(end);
    Ask add{
        FARANDOLE_ADD_SET, {0, 2}, nullptr, nullptr, "added"};  // by the world, which are these now
    self.run(add);
  });
}

// A join() that can't be answered ends; whoever has not joined goes on counting its own unnamed calls.
TEST(a_rank_may_leave_while_others_join) {
  run_jobs({2, 3}, [](TestRank& self) {
    if (self.rank == 0) return;
    Floats data(3);
    self.fails(allreduce(data), ErrorCode::kPeer);
    while (self.rank == 1 && self.bootstrap.told(0) < static_cast<uint32_t>(self.size) - 2) {
      self.finish(self.submit({FARANDOLE_JOIN, {}, nullptr, nullptr, ""}));
    }
    for (int round = 0; round < 50; ++round) {
      std::vector<Handle> handles;
      std::vector<Floats> many(40, data);
      for (Floats& one : many) handles.push_back(self.submit(allreduce(one)));
      for (Handle handle : handles) CHECK_EQ(self.wait({handle}).code, ErrorCode::kPeer);
    }
    self.bootstrap.tell(0);
  });
}

// Whoever fails takes all down: calls under way, and the next ones.
TEST(a_failing_rank_fails_all) {
  run_jobs({1, 2, 3, 4}, [](TestRank& self) {
    self.check_usable();
    if (self.rank == self.size - 1) {
      if (self.size > 1) self.bootstrap.await(0, static_cast<uint32_t>(self.size) - 1);
      return self.leave_failed("ValueError: no such file");
    }
    Floats data(3000);
    Handle waiting = self.submit(allreduce(data, "waiting"));
    Handle join = self.rank == 1 ? self.submit({FARANDOLE_JOIN, {}, nullptr, nullptr, ""}) : 0;
    self.bootstrap.tell(0);
    const Failure failure = self.wait({waiting});
    CHECK_EQ(failure.code, ErrorCode::kPeer);
    const std::string says = "rank " + std::to_string(self.size - 1) + " left: ValueError";
    CHECK(contains(failure.text, says));
    if (join) CHECK_EQ(self.wait({join}).code, ErrorCode::kPeer);
    check_broken(self, says);
  });
}

// A broken job waits for its end without work.
TEST(a_broken_job_is_idle) {
  const auto watchful = [](Config& config) { config.stall_warn = 0.02; };
  run_job(
      Kind::kProcesses, 2,
      [](TestRank& self) {
        Floats data(3);
        if (self.rank == 1) {
          self.bootstrap.await(0, 1);
          return self.leave_failed("gone");
        }
        Handle handle = self.submit(allreduce(data, "waiting"));
        self.bootstrap.tell(0);
        CHECK_EQ(self.wait({handle}).code, ErrorCode::kPeer);
        const int64_t before = cpu_us();
        self.bootstrap.await(1, 1, Deadline::in(1300ms));  // sleepers look around after 1 s
        CHECK(cpu_us() - before < 50'000);
      },
      watchful);
}

// The ranks' rows are no more than a claim: the result would fill the address space.
TEST(a_result_without_memory_breaks_the_job) {
  skip_under({"__asan_init", "__tsan_init"}, "it would end the program");
  run_jobs({1, 2, 3}, [](TestRank& self) {
    float first = 1;
    const int64_t rows = int64_t{1} << 45;
    const Handle handle = self.submit({FARANDOLE_ALLGATHER, {rows}, &first, nullptr, "too much"});
    Floats data(3);
    const Failure failure = self.wait({handle});
    CHECK(failure.code == ErrorCode::kLibrary || failure.code == ErrorCode::kPeer);
    CHECK(contains(failure.text, "no memory for a result of"));
    CHECK_THROWS(self.submit(allreduce(data)), failure.code);
  });
}

// Other threads are inside submit() and wait() meanwhile, and hold on to the runtime.
TEST(a_rank_may_leave_while_threads_submit) {
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
            Handle handle = TestRank::submit(*runtime, {&request, 1}).front();
            while (runtime->driver().wait({&handle, 1}, patience(), failure) ==
                   WaitEnd::kTimeIsUp) {
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

// The call of the thread came first, so the coordinator hears of it first, and it ends as every call under way does.
TEST(a_rank_may_leave_while_a_thread_is_in_a_cell) {
  run_jobs({2}, [](TestRank& self) {
    Floats data(3);
    const CheckedCall call = self.prepare(allreduce(data, "met"));
    auto make = [&] {
      data = values_of(self.rank, 3);
      return self.call(call, data);
    };
    auto make_and_fail = [&] {
      const Failure failure = make();
      CHECK_EQ(failure.code, ErrorCode::kPeer);
      CHECK(contains(failure.text, "rank 0 finished normally"));
    };
    for (int i = 0; i < 3; ++i) {
      CHECK(!make());
      CHECK(data == sum_over(self.size, 3));
    }
    if (self.rank == 1) {
      self.bootstrap.await(0, 1);
      return make_and_fail();
    }
    const uint64_t before = self.tally().submitted;
    std::thread thread(make_and_fail);
    while (self.tally().submitted == before) std::this_thread::yield();
    CHECK(!self.runtime()->leave(false, "", Deadline::in(0ms)));
    thread.join();
    self.bootstrap.tell(0);
  });
}

TEST(two_threads_may_leave_at_once) {
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
      self.bootstrap.tell(0);
    } else {
      self.bootstrap.await(0, 1);
    }
  });
}

namespace {

// The control segment as this process has mapped it.
std::span<std::byte> control_memory() {
  for (const std::string& line : mapped_segments()) {
    if (!contains(line, "farandole-control")) continue;
    const auto dash = line.find('-');
    auto* begin = reinterpret_cast<std::byte*>(std::stoul(line.substr(0, dash), nullptr, 16));
    auto* end = reinterpret_cast<std::byte*>(std::stoul(line.substr(dash + 1), nullptr, 16));
    return {begin, end};
  }
  fail("no control segment is mapped");
}

// As a bug in the user's program may do it: a record that nobody has written.
void claim_a_record(std::byte* ring) {
  auto* header = reinterpret_cast<RingHeader*>(ring);
  std::byte* data = ring + sizeof(RingHeader);
  std::memset(data + header->head % ShmLayout::kRingBytes, 0xa5, 8);
  header->head += 8;
}

}  // namespace

// Everybody hears of it, and nobody spins over what can't be read.
TEST(overwritten_rings_break_the_job_and_nobody_spins) {
  skip_under({"__tsan_init"}, "memory is overwritten while others use it: a race on purpose");
  for (bool reports : {true, false}) {
    for (int victim : {0, 1}) {
      run_job(Kind::kProcesses, 3, [&](TestRank& self) {
        self.check_usable();
        self.bootstrap.barrier();
        const uint32_t readers = reports ? 2 : 1;
        std::jthread bug;
        if (self.rank == victim) {
          ShmLayout layout(control_memory().data(), self.size);
          std::byte* ring = reports ? layout.up(victim) : layout.down(victim);
          Wakeup reader = layout.wakeup(reports ? 0 : victim);
          // Again and again, as what the ring's writer still had to say covers the nonsense.
          bug = std::jthread([&self, ring, reader, readers]() mutable {
            do claim_a_record(ring), reader.notify();
            while (!self.bootstrap.await(0, readers, Deadline::in(10ms)));
          });
        }
        // Who is to read the nonsense comes first.
        if ((self.rank == victim) == reports) self.bootstrap.await(0, readers);
        Floats data(3);
        const Failure failure = self.outcome(allreduce(data, "after"));
        self.bootstrap.tell(0);
        CHECK(failure.code == ErrorCode::kPeer || failure.code == ErrorCode::kInternal);
        self.bootstrap.barrier();
        const int64_t before = cpu_us();
        self.bootstrap.await(1, 1, Deadline::in(300ms));
        CHECK(cpu_us() - before < 50'000);
      });
    }
  }
}

// Rank 0 would know who has not left, but is stopped itself.
TEST(leaving_has_a_limit_though_rank_0_stands_still) {
  LocalBootstrap bootstrap(2);
  std::atomic<pid_t>& stopped = *static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  run_in_forks(2, [&](int rank) {
    Config config = test_config();
    config.shutdown_timeout = 0.2;
    TestRank self(bootstrap, rank, config);
    self.start();
    self.check_usable();
    if (rank == 0) {
      stopped = getpid();
      bootstrap.tell(0);
      raise(SIGSTOP);
      return self.leave_failed("it was stopped");
    }
    bootstrap.await(0, 1);
    const pid_t leader = stopped;
    const Failure failure = *self.runtime()->leave(false, "", patience());
    kill(leader, SIGCONT);
    CHECK_EQ(failure.code, ErrorCode::kStall);
    CHECK(contains(failure.text, "rank 0"));
  });
}

// Rank 1 stands still while it has more to read than its ring holds. Rank 0 is done with the job at once, but not gone.
TEST(the_end_of_a_leader_takes_no_entries_with_it) {
  constexpr int kSubmitted = 0, kLast = 1, kLeave = 2;  // events
  LocalBootstrap bootstrap(2);
  Children children(bootstrap, {}, {}, [](TestRank& self) {
    if (self.rank == 0) {
      self.bootstrap.await(kSubmitted, 1);
      raise(SIGSTOP);
      std::thread watcher([&self, runtime = self.runtime()]() mutable {
        while (!runtime->calls().job.stopped()) std::this_thread::yield();
        self.bootstrap.tell(kLast);
        runtime.reset();
      });
      self.leave();
      return watcher.join();
    }
    std::vector<Floats> data(3000, Floats(1));  // of calls that rank 0 does not make
    std::vector<Handle> handles;
    for (Floats& one : data) handles.push_back(self.submit(allreduce(one)));
    self.runtime()->driver().explain(handles.back(), patience());  // rank 0 has heard of all
    self.bootstrap.tell(kSubmitted);
    self.bootstrap.await(kLeave, 1);
    CHECK(!self.runtime()->leave(false, "", Deadline::in(0ms)));
    raise(SIGSTOP);
    CHECK(contains(self.wait({handles.back()}).text, "finished normally"));  // rank 0 or rank 1
    self.leave();
  });
  children.await_stop(0);
  bootstrap.tell(kLeave);
  children.await_stop(1);
  children.send(0, SIGCONT);
  bootstrap.await(kLast, 1);
  children.send(1, SIGCONT);
  children.end_well();
}

// As Ctrl-C does it.
TEST(a_normal_leave_may_become_a_failed_one) {
  run_jobs({2}, [](TestRank& self) {
    if (self.rank == 1) {
      CHECK(!self.runtime()->leave(false, "", Deadline::in(1ms)));
      self.bootstrap.tell(0);
      return self.leave_failed("KeyboardInterrupt");
    }
    self.bootstrap.await(0, 1);
    const Failure failure = work_until_failure(self);
    CHECK(contains(failure.text, "rank 1"));
  });
}
