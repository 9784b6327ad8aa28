// SPDX-License-Identifier: Apache-2.0
// What the programs here share: forked ranks, a spinning barrier among them, and medians.
#pragma once

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace farandole::bench {

// In shared memory that starts as zeros. Ranks may outnumber cores: it yields, and never sleeps.
class SpinBarrier {
 public:
  void meet(int ranks) {
    const uint32_t turn = turn_.load();
    if (arrived_.fetch_add(1) + 1 == ranks) {
      arrived_.store(0);
      turn_.fetch_add(1);
      return;
    }
    for (int spins = 0; turn_.load() == turn; ++spins) {
      if (spins > 1000) ::sched_yield();
    }
  }

 private:
  std::atomic<int> arrived_{0};
  std::atomic<uint32_t> turn_{0};
};

// Runs rank(0) here and the others in forks; true if all returned 0.
template <class Rank>
bool run_ranks(int ranks, Rank&& rank) {
  std::vector<pid_t> children;
  for (int number = 1; number < ranks; ++number) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(rank(number));
    children.push_back(child);
  }
  bool right = rank(0) == 0;
  for (pid_t child : children) {
    int status = 1;
    ::waitpid(child, &status, 0);
    right &= status == 0;
  }
  return right;
}

// Of nanoseconds, in microseconds; q 0.5 is the median.
inline double quantile_us(std::vector<int64_t>& times, double q) {
  std::sort(times.begin(), times.end());
  const auto last = static_cast<double>(times.size() - 1);
  return static_cast<double>(times[static_cast<size_t>(q * last)]) / 1e3;
}

}  // namespace farandole::bench
