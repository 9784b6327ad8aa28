// SPDX-License-Identifier: Apache-2.0
// Checks the calls that users make, and hands them to RankCalls. Any thread.
#pragma once

#include <span>
#include <vector>

#include "runtime/calls/rank_calls.h"
#include "runtime/driver.h"
#include "runtime/gpu_access.h"

namespace farandole {

class Submitter {
 public:
  Submitter(Rank own, bool check_numerics, RankCalls& calls, GpuAccess& gpus, Driver& driver)
      : own_(own), check_numerics_(check_numerics), calls_(calls), gpus_(gpus), driver_(driver) {}

  // Submits all or none; on an argument error the peers' calls fail, too.
  std::vector<Handle> submit(std::span<const farandole_request> requests);
  // Checks a request once, to submit it repeatedly.
  CheckedCall prepare(const farandole_request& request);
  // Submits prepared calls in order, up to the first that fails, whose error it throws; sets the handles of
  // those before.
  void submit(std::span<Prepared> batch);
  void refuse(const farandole_request& request, const Failure& why);

 private:
  // `repeats`: it is submitted later, with other buffers.
  CheckedCall check(const farandole_request& request, bool repeats);
  Failure fault_of(Prepared& prepared);
  void refuse(std::span<const farandole_request> requests, const Error& why, bool free_only);

  const Rank own_;
  const bool check_numerics_;
  RankCalls& calls_;
  GpuAccess& gpus_;
  Driver& driver_;
};

}  // namespace farandole
