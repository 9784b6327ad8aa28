// SPDX-License-Identifier: Apache-2.0
// Shared by these programs: forked ranks, a spinning barrier, and quantiles.
#pragma once

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace farandole::bench {

// Place it in zeroed shared memory. Ranks may outnumber cores, so it yields; it never sleeps.
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

// Runs rank(0) in this process and the other ranks in forks; true if all returned 0.
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

// Quantile of nanoseconds, in microseconds; q 0.5 is the median.
inline double quantile_us(std::vector<int64_t>& times, double q) {
  std::sort(times.begin(), times.end());
  const auto last = static_cast<double>(times.size() - 1);
  return static_cast<double>(times[static_cast<size_t>(q * last)]) / 1e3;
}

}  // namespace farandole::bench
