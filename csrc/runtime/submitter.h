// SPDX-License-Identifier: Apache-2.0
// Checks the calls that users submit, records them and reports them to the coordinator. Any thread.
#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "runtime/calls/rank_calls.h"
#include "runtime/calls/request_checks.h"
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

  // Submits all or none; on an argument error the peers' calls fail, too.
  std::vector<Handle> submit(std::span<const farandole_request> requests);
  // Checks a request once, to submit it repeatedly.
  CheckedCall make_persistent(const farandole_request& request);
  // Submits prepared requests in order, up to the first that fails, whose error it throws; sets the handles of
  // those before.
  struct Prepared {
    const CheckedCall* call;
    const void* input;
    void* output;
    uint64_t stream = 0;
    Handle handle = 0;
  };
  void submit(std::span<Prepared> batch);
  void refuse(const farandole_request& request, const Failure& why);
  // How many unnamed calls (a group counts once) this rank has made in the set.
  int64_t count_unnamed(SetId set);
  // This rank leaves: later submissions throw ShutdownError.
  void close() { closed_ = true; }

 private:
  void check_open() const;
  // ---- Under RankCalls::mutex
  CheckedCall take_in_one(const farandole_request& request);
  std::vector<CheckedCall> take_in_all(std::span<const farandole_request> requests);
  void name_group(std::vector<CheckedCall>& all, size_t size);
  void describe(CheckedCall& checked);  // fills in what the recorder shows
  Handle enter(const Request& request, Submission submission, bool rides = true);
  Handle enter(const Prepared& prepared, bool rides);
  void refuse_locked(const Request& request, const Failure& why);
  void refuse_message(const Request& request, Failure why);
  void refuse_all(std::span<const farandole_request> requests, const Failure& why, bool free_only);

  const Rank own_;
  const bool check_numerics_;
  RankCalls& calls_;
  GpuAccess& gpus_;
  Driver& driver_;
  Recorder& recorder_;
  std::atomic<bool> closed_{false};
  uint64_t persistent_ = 0;  // how many requests are; guarded by RankCalls::mutex
};

}  // namespace farandole
