// SPDX-License-Identifier: Apache-2.0
// The calls of one rank: what submitters and the driver share.
#pragma once

#include <mutex>
#include <span>
#include <utility>

#include "runtime/calls/handles.h"
#include "runtime/calls/job_state.h"
#include "runtime/calls/pending.h"
#include "runtime/calls/process_sets.h"
#include "runtime/calls/questions.h"
#include "runtime/calls/reporter.h"

namespace farandole {

struct RankCalls {
  RankCalls(Rank own, MemberChannel& channel, bool gathered)
      : sets(own), reporter(channel, gathered) {}

  std::mutex mutex;  // of what follows
  PendingTable pending;
  ProcessSets sets;
  Reporter reporter;
  Questions questions;

  // With locks of their own.
  Handles handles;
  JobState job;

  // One report to the coordinator, at once.
  void report(Report report) {
    std::lock_guard lock(mutex);
    reporter.send(std::move(report));
  }
  // As Reporter has them; nobody waits for the mutex where they would do nothing.
  void await(std::span<const Handle> wanted) {
    if (!reporter.withholds()) return;
    std::lock_guard lock(mutex);
    reporter.await(wanted);
  }
  void hurry() {
    if (!reporter.may_hurry()) return;
    std::lock_guard lock(mutex);
    reporter.hurry();
  }
};

}  // namespace farandole
