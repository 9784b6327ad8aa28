// SPDX-License-Identifier: Apache-2.0
// Ranks that are killed: the others know it at once, by an error and by one line. Whoever has left may end.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "random.h"
#include "runtime/runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

// Returns when the last survivor knew of it: nanoseconds after the death.
int64_t kill_one_of(int ranks, uint64_t seed) {
  Random random(seed);
  const int victim = static_cast<int>(random.below(static_cast<uint64_t>(ranks)));
  const uint64_t us = random.below(6000);
  const std::string name = "rank " + std::to_string(victim);
  LocalBootstrap bootstrap(ranks);
  Children children(bootstrap, {}, {}, [&](TestRank& self) {
    self.check_usable();
    bootstrap.barrier();  // nobody dies before all have come so far
    if (self.rank == victim) strike_in(static_cast<int64_t>(us), SIGKILL);
    const Failure failure = work_until_failure(self);
    bootstrap.time_of(self.rank) = now_ns();
    CHECK_EQ(failure.code, ErrorCode::kPeer);
    CHECK(contains(failure.text, name));
    check_broken(self, name);
    self.leave();
  });
  const int end = children.end_of(victim);
  CHECK(WIFSIGNALED(end) && WTERMSIG(end) == SIGKILL);
  const int64_t died = now_ns();
  int64_t last = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == victim) continue;
    if (children.end_of(rank) != 0) fail("it failed with seed " + std::to_string(seed));
    last = std::max(last, bootstrap.time_of(rank) - died);
  }
  CHECK_EQ(waitpid(-1, nullptr, WNOHANG), -1);  // none is left
  return last;
}

}  // namespace

// `--seeds 200 --ranks 4` for longer runs, `--first 7` for other ones. A busy machine may make some of them late.
TEST(a_killed_rank_fails_all_others_soon) {
  const std::string seeds = option("seeds"), ranks = option("ranks");
  std::vector<int64_t> delays;
  const uint64_t first = option("first").empty() ? 0 : std::stoull(option("first"));
  for (uint64_t n = 0; n < (seeds.empty() ? 20 : std::stoull(seeds)); ++n) {
    const uint64_t seed = first + n;
    const int size = ranks.empty() ? 2 + static_cast<int>(seed % 3) : std::stoi(ranks);
    delays.push_back(kill_one_of(size, seed));
  }
  std::ranges::sort(delays);
  CHECK(delays.back() < 20'000'000'000);
  CHECK(delays[delays.size() * 9 / 10] < 2'000'000'000);
}

namespace {

// What `body` and its forks write to stderr.
std::string stderr_of(const std::function<void()>& body) {
  const int file = memfd_create("stderr", MFD_CLOEXEC);
  const int before = dup(STDERR_FILENO);
  CHECK(file >= 0 && before >= 0);
  CHECK_EQ(fcntl(file, F_SETFL, O_APPEND), 0);  // or writes of two processes may land on each other
  dup2(file, STDERR_FILENO);
  body();
  dup2(before, STDERR_FILENO);
  close(before);
  std::string text(static_cast<size_t>(lseek(file, 0, SEEK_END)), ' ');
  CHECK_EQ(pread(file, text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  close(file);
  return text;
}

void loud(Config& config) { config.log_level = "error"; }

}  // namespace

// The leader tells of its members; everyone of the leader, which can't.
TEST(a_death_is_told_in_one_line) {
  for (int victim = 0; victim < 3; ++victim) {
    LocalBootstrap bootstrap(3);
    const std::string text = stderr_of([&] {
      Children children(bootstrap, {}, loud, [&](TestRank& self) {
        self.check_usable();
        self.bootstrap.barrier();
        if (self.rank == victim) raise(SIGKILL);
        Floats data(3);
        self.fails(allreduce(data), ErrorCode::kPeer);
        self.leave();
      });
      for (int rank = 0; rank < 3; ++rank) children.end_of(rank);
    });
    const auto lines = std::count(text.begin(), text.end(), '\n');
    if (lines != (victim == 0 ? 2 : 1)) fail("not one line for each witness: " + text);
    CHECK(contains(text, "rank " + std::to_string(victim) + " (pid "));
  }
}

// Some processes end before others have read that all may.
TEST(a_normal_end_is_no_death) {
  const std::string text = stderr_of([] {
    for (int round = 0; round < 15; ++round) {
      for (int ranks : {2, 4}) {
        run_job(Kind::kProcesses, ranks, [](TestRank& self) { self.check_usable(); }, loud);
      }
    }
  });
  if (!text.empty()) fail("a normal end was taken for a death: " + text);
}

// Nor is the end of a host a connection that was lost.
TEST(hosts_that_end_normally_are_not_lost) {
  const std::string text = stderr_of([] {
    for (int round = 0; round < 5; ++round) {
      run_job(Kind::kProcesses, 4, [](TestRank& self) { self.check_usable(); }, loud, {0, 0, 2, 3});
    }
  });
  if (!text.empty()) fail("a normal end was taken for a loss: " + text);
}

namespace {

// By the control connection and by a wire.
void sum_twice(int rank) {
  for (size_t n : {size_t{3}, size_t{100'000}}) {
    Floats data = values_of(rank, n);
    const Ask ask = allreduce(data);
    int64_t handle = 0;
    CHECK_EQ(submit_by_abi(ask, handle), FARANDOLE_OK);
    CHECK_EQ(farandole_wait(&handle, 1, 60), FARANDOLE_OK);
    CHECK(data == sum_over(2, n));
  }
}

// Ends by SIGKILL when it has a child, which lives until event 2.
void leave_a_child(LocalBootstrap& bootstrap) {
  init_by_abi(bootstrap, 0, {0, 1});
  sum_twice(0);
  if (fork() == 0) {
    farandole_forked();
    bootstrap.tell(1);
    bootstrap.await(2, 1);
    _exit(0);
  }
  bootstrap.await(1, 1);
  bootstrap.await(3, 1);  // else the death could end rank 1's calls
  raise(SIGKILL);
}

}  // namespace

// A child of the killed rank, such as a worker that loads data, lives on till the other host knows.
TEST(a_child_of_a_killed_rank_keeps_no_connection_to_other_hosts) {
  LocalBootstrap bootstrap(2);
  setenv("FARANDOLE_PEER_TIMEOUT", "600", 1);  // longer than a test may take
  const pid_t killed = fork_bound();
  if (killed == 0) {
    try {
      leave_a_child(bootstrap);
    } catch (const Failed&) {  // printed
    }
    _exit(1);
  }
  run_in_fork([&] {
    init_by_abi(bootstrap, 1, {0, 1});
    sum_twice(1);
    bootstrap.tell(3);
    Floats data(3);
    const Ask ask = allreduce(data);
    int64_t handle = 0;
    int32_t code = submit_by_abi(ask, handle);
    if (code == FARANDOLE_OK) code = farandole_wait(&handle, 1, 60);
    bootstrap.tell(2);
    CHECK_EQ(code, FARANDOLE_E_PEER);
    CHECK(contains(farandole_error(), "rank 0"));
  });
  unsetenv("FARANDOLE_PEER_TIMEOUT");
  int status = 0;
  CHECK_EQ(waitpid(killed, &status, 0), killed);
  CHECK(WIFSIGNALED(status));
}
