// SPDX-License-Identifier: Apache-2.0
#include "lib/os/thread.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <future>

#include "check.h"
#include "lib/os/text_file.h"

using namespace farandole;

// Signals belong to the user's threads; those keep theirs.
TEST(a_thread_of_ours_blocks_all_signals) {
  bool blocked = false;
  Thread thread = start_thread("farandole-with-a-long-name", [&] {
    sigset_t set;
    pthread_sigmask(SIG_SETMASK, nullptr, &set);
    blocked = sigismember(&set, SIGINT) == 1 && sigismember(&set, SIGUSR1) == 1;
  });
  thread.join();
  CHECK(blocked);
  sigset_t set;
  pthread_sigmask(SIG_SETMASK, nullptr, &set);
  CHECK_EQ(sigismember(&set, SIGINT), 0);
}

// Linux refuses a name of more than 15 characters.
TEST(a_long_name_is_cut) {
  std::promise<void> named;
  std::string name;
  Thread thread = start_thread("farandole-with-a-long-name", [&] {
    named.get_future().wait();
    name = read_text_file("/proc/thread-self/comm");
  });
  named.set_value();
  thread.join();
  CHECK_EQ(name, "farandole-with-\n");
}

TEST(sleeps_of_a_thread_that_asks_are_punctual) {
  int slack_ns = 0;
  Thread thread = start_thread("farandole", [&] {
    ask_for_punctual_sleeps();
    slack_ns = prctl(PR_GET_TIMERSLACK);
  });
  thread.join();
  CHECK_EQ(slack_ns, 1);
}

TEST(real_time_where_it_is_permitted) {
  check::run_in_fork([] {
    const bool permitted = ask_for_real_time();
    CHECK_EQ(sched_getscheduler(0) & ~SCHED_RESET_ON_FORK, permitted ? SCHED_RR : SCHED_OTHER);
    if (geteuid() != 0) return;
    const sched_param none{};
    CHECK_EQ(sched_setscheduler(0, SCHED_OTHER, &none), 0);
    const rlimit zero{0, 0};
    CHECK_EQ(setrlimit(RLIMIT_RTPRIO, &zero), 0);
    CHECK_EQ(setuid(65534), 0);
    CHECK(!ask_for_real_time());
    CHECK_EQ(sched_getscheduler(0), SCHED_OTHER);
  });
}

TEST(a_policy_that_the_user_chose_stays) {
  check::run_in_fork([] {
    const sched_param none{};
    CHECK_EQ(sched_setscheduler(0, SCHED_BATCH, &none), 0);
    CHECK(ask_for_real_time());
    CHECK_EQ(sched_getscheduler(0), SCHED_BATCH);
  });
}

TEST(a_short_slice_leaves_niceness_alone) {
  check::run_in_fork([] {
    const int niceness = nice(5);  // of whoever runs the tests, and five
    Thread thread = start_thread("farandole", [niceness] {
      ask_for_short_slice();
      CHECK_EQ(getpriority(PRIO_PROCESS, 0), niceness);
    });
    thread.join();
  });
}
