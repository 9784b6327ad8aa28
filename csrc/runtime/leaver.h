// SPDX-License-Identifier: Apache-2.0
// How a rank leaves the job: reports it, waits for the others as long as the settings allow, then fails its
// calls in flight. Any thread.
#pragma once

#include <mutex>
#include <string>

#include "runtime/driver.h"
#include "runtime/rank_watch.h"

namespace farandole {

class Leaver {
 public:
  Leaver(const Config& config, RankCalls& calls, Driver& driver, RankWatch& watch)
      : config_(config), calls_(calls), driver_(driver), watch_(watch) {}

  // Waits until `deadline`; true: this rank has left and its runtime may be destroyed. Idempotent; a normal
  // leave may be turned into a failed one.
  bool leave(bool failed, const std::string& why, Deadline deadline);
  // Why this rank, after a normal leave, did not wait until the others had left; empty: it did.
  Failure gave_up() const;

 private:
  Deadline say(bool failed, const std::string& why);
  Failure why_alone() const;

  const Config& config_;
  RankCalls& calls_;
  Driver& driver_;
  RankWatch& watch_;
  mutable std::mutex mutex_;  // guards all below
  bool said_ = false;
  bool said_failed_ = false;
  Deadline limit_ = Deadline::never();
  Failure gave_up_;
};

}  // namespace farandole
