// SPDX-License-Identifier: Apache-2.0
// Ranks that stand still (SIGSTOP): the others are told who it is, and their buffers are theirs again.
#include <signal.h>

#include <algorithm>
#include <cstring>

#include "control/hosts/host_tree.h"
#include "runtime/runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;
using namespace std::chrono_literals;

namespace {

constexpr int kRefilled = 0;  // events
constexpr int kOver = 1;
constexpr int kStopped = 2;
constexpr float kMark = 7654321.0F;

// What this rank's part of one big call ended with; its buffer is refilled then, and must stay so until
// the stopped rank has gone on and ended too.
void big_call(TestRank& self, int victim, long us) {
  self.check_usable();
  Floats data = values_of(self.rank, 8'000'000);
  self.bootstrap.barrier();  // else one that is slow to fill its buffer may be what stalls
  if (self.rank == victim) strike_in(us, SIGSTOP);
  const Failure failure = self.outcome(allreduce(data, "big"));
  if (failure && self.rank != victim) {
    CHECK_EQ(failure.code, ErrorCode::kStall);
    CHECK(contains(failure.text, "rank " + std::to_string(victim)));
    CHECK(contains(failure.text, "stopped by a signal or a debugger"));
    self.bootstrap.time_of(self.rank) = contains(failure.text, "it has not ended") ? 2 : 1;
  }
  std::fill(data.begin(), data.end(), kMark);
  self.bootstrap.tell(kRefilled);
  self.bootstrap.await(kOver, 1);
  CHECK(std::ranges::count(data, kMark) == std::ssize(data));
}

// Returns what the others met: 0: the call was over before the stop, 1: a stall, 2: one in mid-bucket.
int64_t stop_one_of(int ranks, int victim, long us) {
  LocalBootstrap bootstrap(ranks);
  Children children(bootstrap, {}, stall_after(0.3),
                    [&](TestRank& self) { big_call(self, victim, us); });
  children.await_stop(victim);
  bootstrap.await(kRefilled, static_cast<uint32_t>(ranks - 1));
  const bool was_over = bootstrap.told(kRefilled) == static_cast<uint32_t>(ranks);
  children.send(victim, SIGCONT);
  bootstrap.await(kRefilled, static_cast<uint32_t>(ranks));
  bootstrap.tell(kOver);
  children.end_well();
  return was_over ? 0 : bootstrap.time_of(victim == 0 ? 1 : 0).load();
}

// Stops at one moment after the other, three times at least and until somebody meets what is wanted.
int64_t worst_of_some(int ranks, int victim, int64_t wanted) {
  int64_t worst = 0;
  for (long ms = 1; ms <= 3 || (ms <= 30 && worst < wanted); ++ms) {
    worst = std::max(worst, stop_one_of(ranks, victim, 1000 * ms));
  }
  return worst;
}

}  // namespace

TEST(all_others_learn_that_a_member_stopped_in_mid_bucket) {
  for (int ranks : {2, 4}) CHECK_EQ(worst_of_some(ranks, 1, 2), 2);
}

// It can't tell: its waiters look themselves.
TEST(the_others_learn_that_a_leader_stopped) { CHECK(worst_of_some(2, 0, 1) > 0); }

namespace {

// Stops `victim` while the others wait for it in a call; they check what it fails with.
void stop_a_leader(const Nodes& nodes, Rank victim, double limit,
                   const std::function<void(Rank, const std::string&)>& check) {
  const int ranks = static_cast<int>(nodes.size());
  LocalBootstrap bootstrap(ranks);
  Children children(bootstrap, nodes, stall_after(limit), [&](TestRank& self) {
    self.check_usable();
    self.bootstrap.barrier();
    if (self.rank == victim) {
      raise(SIGSTOP);
      return;
    }
    self.bootstrap.await(kStopped, 1);
    Floats data = values_of(self.rank, 10);
    const std::string text = self.fails(allreduce(data, "small"), ErrorCode::kStall);
    self.bootstrap.tell(kOver);
    check(self.rank, text);
    self.bootstrap.await(kOver, static_cast<uint32_t>(ranks - 1));  // else others hear of its end
  });
  children.await_stop(victim);
  bootstrap.tell(kStopped);
  bootstrap.await(kOver, static_cast<uint32_t>(ranks - 1));
  children.send(victim, SIGCONT);
  children.end_well();
}

}  // namespace

// On another host nobody sees its process, and its kernel keeps the connections alive.
TEST(ranks_of_other_hosts_learn_that_the_job_s_leader_stopped) {
  stop_a_leader({0, 1, 1}, 0, 0.5, [](Rank, const std::string& text) {
    CHECK(contains(text, "rank 0 on ") && contains(text, "kill -CONT"));
  });
}

// 34 hosts: the last one is below rank 1's, and hears of rank 0 through it only. Ranks that are asked have 1.5 s to answer,
// which they get from this limit on.
TEST(a_leader_that_stops_on_the_way_to_rank_0_is_named) {
  CHECK_EQ(HostTree::of(33, numbers_below(34)).parent, 1);
  stop_a_leader(numbers_below(34), 1, 6.5, [](Rank rank, const std::string& text) {
    const std::string behind = "rank 33 can't be reached: rank 1, which forwards its reports";
    if (!contains(text, rank == 33 ? "rank 1 on " : behind)) fail(text);
  });
}

// Its process runs, but a thread of its user's drives and is stuck.
TEST(the_others_learn_that_rank_0_does_not_answer) {
  run_job(
      Kind::kThreads, 2,
      [](TestRank& self) {
        self.check_usable();
        self.bootstrap.barrier();
        if (self.rank == 0) {
          Driver& driver = self.runtime()->driver();
          driver.await(
              [&] {
                // The background thread soon stops driving; a caller that drives does not while it is here.
                while (driver.driven() && self.bootstrap.told(kOver) == 0) {
                  if (self.bootstrap.told(kStopped) == 0) self.bootstrap.tell(kStopped);
                  std::this_thread::yield();
                }
                return self.bootstrap.told(kOver) != 0;
              },
              patience());
          return self.leave_failed("it was stuck");
        }
        self.bootstrap.await(kStopped, 1);
        Floats data = values_of(self.rank, 10);
        const std::string text = self.fails(allreduce(data, "small"), ErrorCode::kStall);
        self.bootstrap.tell(kOver);
        CHECK(contains(text, "rank 0, which leads the job, does not answer"));
        self.leave_failed(text);
      },
      stall_after(0.3));
}

// Rank 1 lives, and makes no call.
TEST(a_join_has_a_limit) {
  run_job(
      Kind::kThreads, 2,
      [](TestRank& self) {
        self.check_usable();
        if (self.rank == 0) {
          const Ask join{FARANDOLE_JOIN, {}, nullptr, nullptr, ""};
          CHECK(contains(self.fails(join, ErrorCode::kStall), ", rank 1 missing"));
          self.bootstrap.tell(kOver);
        }
        self.bootstrap.await(kOver, 1);
        self.check_usable();
      },
      stall_after(1));
}
