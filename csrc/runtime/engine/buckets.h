// SPDX-License-Identifier: Apache-2.0
// A bucket's begin and end on this rank: a Run entry becomes this rank's buffers, and its calls end with it.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "data/backend/lane.h"
#include "runtime/calls/rank_calls.h"
#include "watch/recorder.h"

namespace farandole {

// What happens to one call of this rank when its bucket ends.
struct Ending {
  Submission submission;
  Outcome outcome;
  bool launched = false;  // on a GPU: the outcome was published already
};

// Ends calls: frees their names, tells the recorder, completes the handles. The driver only.
class Finisher {
 public:
  // `on_failure`: called on the first failure of each kind, and on the job's.
  Finisher(RankCalls& calls, Recorder& recorder, std::function<void(const Failure&)> on_failure)
      : calls_(calls), recorder_(recorder), on_failure_(std::move(on_failure)) {}

  void finish(Submission submission, Outcome outcome);
  // Does each step for all endings at once, to take the mutex once. `failure`: of all; null: see each outcome.
  void finish_all(std::span<Ending> endings, const Failure* failure = nullptr);
  // On a GPU a call ends twice: launch() lets waiters continue, finish_all() frees the buffers.
  void launch(Ending& ending, const std::shared_ptr<GpuEvent>& past);
  // Calls on_failure for the first failure of each kind: it may explain later ones, while a script may handle
  // the same error again and again.
  void tell_first(const Failure& failure);

 private:
  void end_name(const Submission& submission);
  void settle(const Ending& ending, const Failure* failure);

  RankCalls& calls_;
  Recorder& recorder_;
  const std::function<void(const Failure&)> on_failure_;
  std::set<ErrorCode> told_;
};

// The driver only. It reads requests and sets without the mutex, because only log entries change
// them and only the driver reads the log.
class BucketMaker {
 public:
  BucketMaker(RankCalls& calls, Recorder& recorder, Finisher& finisher)
      : calls_(calls), recorder_(recorder), finisher_(finisher) {}

  // `device`: for outputs on a GPU. When the bucket ends, it informs the recorder, the finisher and the
  // coordinator.
  struct Made {
    Bucket bucket;
    std::shared_ptr<std::vector<Ending>> endings;
  };
  Made make(const Run& run, const ProcessSet& set, uint64_t log_position,
            const std::shared_ptr<GpuDevice>& device);
  // "bucket 7: conv.weight, conv.bias and 3 more", for profilers.
  std::string label_of(const Run& run);

 private:
  std::vector<Item> items_of(const Run& run, int members) const;
  void follow(Made& made, const Run& run, bool lowest);

  RankCalls& calls_;
  Recorder& recorder_;
  Finisher& finisher_;
};

}  // namespace farandole
