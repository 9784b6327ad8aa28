// SPDX-License-Identifier: Apache-2.0
#include "watch/stopped_process.h"

#include <algorithm>

namespace farandole {
namespace {

constexpr int64_t kLongestPeriod = 1'000'000'000;
constexpr int64_t kShortestPeriod = 10'000'000;

// A quarter of the shorter limit, between 10 ms and 1 s.
int64_t period_of(int64_t warn_ns, int64_t give_up_ns) {
  int64_t period = kLongestPeriod;
  for (int64_t limit : {warn_ns, give_up_ns}) {
    if (limit > 0) period = std::min(period, limit / 4);
  }
  return std::max(period, kShortestPeriod);
}

}  // namespace

StoppedProcess::StoppedProcess(int rank, pid_t pid, int64_t warn_ns, int64_t give_up_ns)
    : rank_(rank),
      pid_(warn_ns > 0 || give_up_ns > 0 ? pid : 0),
      warn_ns_(warn_ns),
      give_up_ns_(give_up_ns),
      period_ns_(period_of(warn_ns, give_up_ns)),
      looked_ns_(now_ns()) {}

StoppedProcess::Verdict StoppedProcess::look() {
  std::lock_guard lock(mutex_);
  const int64_t now = now_ns();
  if (pid_ == 0 || now < looked_ns_ + period_ns_) return Verdict::kMoves;
  looked_ns_ = now;
  if (!stands()) {
    since_ns_ = -1;
    warned_ = false;
    return Verdict::kMoves;
  }
  if (since_ns_ < 0) since_ns_ = now;
  if (give_up_ns_ > 0 && now - since_ns_ >= give_up_ns_) return Verdict::kGiveUp;
  if (warned_ || warn_ns_ <= 0 || now - since_ns_ < warn_ns_) return Verdict::kMoves;
  warned_ = true;
  return Verdict::kWarn;
}

std::string StoppedProcess::text() const {
  return "rank " + std::to_string(rank_) + " (pid " + std::to_string(pid_) + "), which leads the " +
         (rank_ == 0 ? "job" : "ranks of this host") +
         ", is stopped by a signal or a debugger; `kill -CONT " + std::to_string(pid_) +
         "` lets it go on";
}

}  // namespace farandole
