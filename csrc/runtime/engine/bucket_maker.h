// SPDX-License-Identifier: Apache-2.0
// From a log entry to a bucket: which buffers of this rank take part, and what its end means for their calls.
#pragma once

#include <memory>
#include <vector>

#include "data/plane/lane.h"
#include "runtime/engine/finisher.h"

namespace farandole {

// The driver only. Requests, sets and the calls of bundles change by the log alone, which the driver reads: to look
// at them it needs no mutex.
class BucketMaker {
 public:
  BucketMaker(RankCalls& calls, Recorder& recorder, Finisher& finisher)
      : calls_(calls), recorder_(recorder), finisher_(finisher) {}

  // `device`: of outputs on a GPU. The bucket tells the recorder and the finisher of its end.
  struct Made {
    Bucket bucket;
    std::shared_ptr<std::vector<Ending>> endings;
  };
  Made make(const Run& run, const ProcessSet& set, uint64_t log_position,
            const std::shared_ptr<GpuDevice>& device);
  // "bucket 7: conv.weight, conv.bias and 3 more": as a profiler shows it.
  std::string label_of(const Run& run);

 private:
  std::vector<Item> items_of(const Run& run, const ProcessSet& set) const;
  void finish_with(Bucket& bucket, const std::shared_ptr<std::vector<Ending>>& endings);
  void watch(Bucket& bucket, const Run& run);

  RankCalls& calls_;
  Recorder& recorder_;
  Finisher& finisher_;
};

}  // namespace farandole
