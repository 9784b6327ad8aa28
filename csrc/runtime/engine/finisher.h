// SPDX-License-Identifier: Apache-2.0
// How calls end on this rank: their names are free again, the recorder knows, and whoever waits goes on.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <span>

#include "runtime/calls/rank_calls.h"
#include "watch/recorder.h"

namespace farandole {

// What a bucket's end means for one call of this rank.
struct Ending {
  Submission submission;
  Outcome outcome;
  bool launched = false;  // on a GPU: the outcome is told already
};

// The driver only.
class Finisher {
 public:
  // on_failure: of the job, or the first of a kind.
  Finisher(RankCalls& calls, Recorder& recorder, std::function<void(const Failure&)> on_failure)
      : calls_(calls), recorder_(recorder), on_failure_(std::move(on_failure)) {}

  void finish(Submission submission, Outcome outcome);
  // Each step for all of them: submitters want the mutex too. What was launched is not told again.
  void finish_all(std::span<Ending> endings);
  // On a GPU a call ends twice: launched for the waiters, settled for the buffers.
  void launch(Ending& ending, const std::shared_ptr<GpuEvent>& past);
  void settle(const Ending& ending, const Failure* failure);
  // What is told early may explain what follows; an error that a script handles again and again is told
  // once.
  void tell_first(const Failure& failure);

 private:
  void end_name(const Submission& submission);

  RankCalls& calls_;
  Recorder& recorder_;
  const std::function<void(const Failure&)> on_failure_;
  std::set<ErrorCode> told_;
};

}  // namespace farandole
