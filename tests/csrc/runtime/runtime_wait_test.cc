// SPDX-License-Identifier: Apache-2.0
// Waiting: who drives, what ends a wait, and that nothing moves while nothing is to be done.
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "runtime/runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;
using namespace std::chrono_literals;

namespace {

void ignore_signal(int) {}

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

}  // namespace

// Each thread submits and waits for its own: one of them drives, or the background thread.
TEST(several_threads_submit_and_wait) {
  run_jobs({1, 2, 3}, [](TestRank& self) {
    in_threads(3, [&self](int t) {
      for (size_t i = 0; i < 25; ++i) {
        Floats data = values_of(self.rank, 10 + i * 100);
        self.run(allreduce(data, std::to_string(t) + "/" + std::to_string(i % 4)));
        CHECK(data == sum_over(self.size, data.size()));
      }
    });
  });
}

// A handle that is unknown shows when the one before it is done, to a caller that drives.
TEST(an_unknown_handle_among_others_is_an_error) {
  run_jobs({2}, [](TestRank& self) {
    Floats data = values_of(self.rank, 4000);
    Failure failure;
    if (self.rank == 1) self.bootstrap.await(0, 1);
    Handle handle = self.submit(allreduce(data, "known"));
    if (self.rank == 0) self.bootstrap.tell(0);
    const std::vector<Handle> handles{handle, handle + 1000};
    CHECK_THROWS(self.runtime()->driver().wait(handles, patience(), failure),
                 ErrorCode::kInvalidArgument);
    self.finish(handle);
    CHECK_THROWS(self.runtime()->handles().done(handle), ErrorCode::kInvalidArgument);
    CHECK_THROWS(self.runtime()->handles().release(handle), ErrorCode::kInvalidArgument);
    self.check_usable();
  });
}

TEST(a_handle_under_way_has_no_result_yet) {
  run_jobs({2}, [](TestRank& self) {
    Floats data = values_of(self.rank, 3);
    if (self.rank == 1) self.bootstrap.await(0, 1);
    Handle handle = self.submit(allreduce(data, "early"));
    if (self.rank == 0) {
      CHECK_THROWS(self.runtime()->handles().look(handle, [](const Outcome&) {}),
                   ErrorCode::kInvalidArgument);
      self.runtime()->handles().release(handle);  // goes when it is done
      self.bootstrap.tell(0);
    } else {
      self.finish(handle);
    }
    self.run({FARANDOLE_BARRIER, {}, nullptr, nullptr, ""});
    CHECK(data == sum_over(self.size, 3));
  });
}

TEST(a_wait_ends_at_its_deadline) {
  run_jobs({2}, [](TestRank& self) {
    Floats data = values_of(self.rank, 3);
    if (self.rank == 0) {
      Handle handle = self.submit(allreduce(data, "late"));
      Failure failure;
      for (auto delay : {0ms, 1ms, 20ms}) {
        const Deadline deadline = Deadline::in(delay);
        CHECK_EQ(self.runtime()->driver().wait({&handle, 1}, deadline, failure),
                 WaitEnd::kTimeIsUp);
        CHECK(deadline.expired());
        CHECK(!self.runtime()->handles().done(handle));
      }
      self.bootstrap.tell(0);
      self.finish(handle);
    } else {
      self.bootstrap.await(0, 1);
      self.run(allreduce(data, "late"));
    }
    CHECK(data == sum_over(self.size, 3));
  });
}

// A driving caller and one that waits for a driver: both return so that handlers may run.
TEST(a_signal_ends_a_wait) {
  run_job(Kind::kProcesses, 2, [](TestRank& self) {
    Floats data = values_of(self.rank, 3);
    if (self.rank == 1) {
      self.bootstrap.await(0, 1);
      return self.check_usable("signalled");
    }
    struct sigaction action{};
    action.sa_handler = ignore_signal;
    action.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &action, nullptr);
    Handle handle = self.submit(allreduce(data, "signalled"));
    std::atomic<uint32_t> returned{0};
    std::vector<std::thread> waiters;
    for (int i = 0; i < 2; ++i) {
      waiters.emplace_back([&] {
        Failure failure;
        CHECK_EQ(self.runtime()->driver().wait({&handle, 1}, patience(), failure),
                 WaitEnd::kTimeIsUp);
        returned.fetch_add(1);
        futex_wake(returned, 2, kFutexAnyBit);
      });
    }
    // Signals until both have gone: one that comes before the wait ends nothing.
    while (returned < 2) {
      for (std::thread& waiter : waiters) pthread_kill(waiter.native_handle(), SIGUSR1);
      const uint32_t seen = returned.load();
      if (seen < 2) futex_wait(returned, seen, kFutexAnyBit, Deadline::in(5ms));
    }
    for (std::thread& waiter : waiters) waiter.join();
    self.bootstrap.tell(0);
    self.finish(handle);
    CHECK(data == sum_over(self.size, 3));
    Floats more = values_of(self.rank, 5000);
    self.run(allreduce(more, "signalled"));
  });
}

// A call that nobody waits for gets its limit while its submitter drives, who then leaves. If the background
// thread is not told, it oversleeps, which counts as a rescued wake-up. (In a round in which it is still
// awake, it sees the limit by itself.)
TEST(a_leaving_driver_hands_on_when_to_look_again) {
  const auto body = [](TestRank& self) {
    Floats alone(3), common = values_of(self.rank, 3);
    self.run(allreduce(common, "common"));
    if (self.rank == 1) return self.bootstrap.await(0, 1);
    const Handle handle = self.submit(allreduce(alone, "alone"));  // drives for a moment
    Handles& handles = self.runtime()->handles();
    for (uint32_t ticket = handles.prepare(); !handles.done(handle); ticket = handles.prepare()) {
      CHECK(handles.wait(ticket, patience()));  // as a caller who does not drive
    }
    CHECK_EQ(self.wait({handle}).code, ErrorCode::kStall);
    self.bootstrap.tell(0);
  };
  for (int round = 0; round < 10; ++round) {
    run_job(Kind::kThreads, 2, body, stall_after(0.05));
  }
}

TEST(an_idle_job_sleeps) {
  run_job(Kind::kProcesses, 3, [](TestRank& self) {
    self.check_usable();
    self.bootstrap.barrier();
    int64_t before = -1;  // once the last reports have been read, however busy the machine is
    for (int looks = 0; looks < 20 && before != sleeps(); ++looks) {
      before = sleeps();
      self.bootstrap.await(0, 1, Deadline::in(100ms));
    }
    self.bootstrap.await(0, 1, Deadline::in(2s));
    const int64_t slept = sleeps() - before;
    self.bootstrap.barrier();  // nobody leaves while others count
    CHECK(slept <= 2 * 2);
  });
}
