// SPDX-License-Identifier: Apache-2.0
#include "lib/thread.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>

#include "check.h"

using namespace farandole;

// Signals belong to the user's threads; those keep theirs.
TEST(a_thread_of_ours_blocks_all_signals) {
  bool blocked = false;
  std::thread thread = start_thread("farandole-with-a-long-name", [&] {
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

TEST(a_short_slice_leaves_niceness_alone) {
  check::run_in_fork([] {
    const int niceness = nice(5);  // of whoever runs the tests, and five
    std::thread thread = start_thread("farandole", [niceness] {
      ask_for_short_slice();
      CHECK_EQ(getpriority(PRIO_PROCESS, 0), niceness);
    });
    thread.join();
  });
}
