// SPDX-License-Identifier: Apache-2.0
// What callers hand in: checked, noted, and reported. Any thread.
#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "runtime/calls/intake.h"
#include "runtime/calls/rank_calls.h"
#include "runtime/driver.h"
#include "runtime/gpu_access.h"

namespace farandole {

class Submitter {
 public:
  Submitter(Rank own, bool check_numerics, RankCalls& calls, GpuAccess& gpus, Driver& driver,
            Recorder& recorder)
      : own_(own),
        check_numerics_(check_numerics),
        calls_(calls),
        gpus_(gpus),
        driver_(driver),
        recorder_(recorder) {}

  // All or none; on an argument error the peers fail too.
  std::vector<Handle> submit(std::span<const farandole_request> requests);
  // A request kept for repeated submission.
  Asked keep(const farandole_request& request);
  Handle submit(const Asked& kept, const void* input, void* output, uint64_t stream);
  void refuse(const farandole_request& request, const Failure& why);
  // Unnamed calls (a group is one) that this rank has made in the set.
  int64_t count_unnamed(SetId set);
  // This rank leaves: whoever comes now comes too late.
  void close() { closed_ = true; }

 private:
  void check_open() const;
  void check_numerics(const Request& request, const Submission& submission);
  // ---- under the mutex of the calls
  Asked take_in_one(const farandole_request& request);
  std::vector<Asked> take_in_all(std::span<const farandole_request> requests);
  void name_group(std::vector<Asked>& all, size_t size);
  void describe(Asked& asked);  // to the recorder
  Handle enter(const Request& request, Submission submission);
  void refuse_locked(const Request& request, const Failure& why);
  void refuse_all(std::span<const farandole_request> requests, const Failure& why, bool free_only);

  const Rank own_;
  const bool check_numerics_;
  RankCalls& calls_;
  GpuAccess& gpus_;
  Driver& driver_;
  Recorder& recorder_;
  std::atomic<bool> closed_{false};
};

}  // namespace farandole
