// SPDX-License-Identifier: Apache-2.0
// One blocking NCCL communicator, with one thread that makes NCCL's calls and one that watches and aborts it.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "data/nccl/nccl_schedule.h"
#include "lib/gpu/gpu_device.h"
#include "lib/gpu/nccl.h"
#include "lib/os/thread.h"

namespace farandole {

class NcclCommunicator {
 public:
  struct Setup {
    std::shared_ptr<const nccl::Api> api;
    std::shared_ptr<GpuDevice> device;
    int member;
    int members;
    std::chrono::nanoseconds open_timeout;  // for any call
    std::chrono::nanoseconds work_timeout;  // for launched work; 0: never
    std::function<void()> changed;          // wakes the driver, from our threads
  };
  NcclCommunicator(Setup setup, const nccl::UniqueId& id);
  // Destroys the communicator if it is healthy and idle; otherwise aborts it, and waits a few seconds. If NCCL does not
  // return by then, our threads stay in it, with the device, until the process ends.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // ---- Driver only
  bool ready() const { return state_ == State::kReady; }  // idle: the next call may come
  bool failed() const { return state_ == State::kFailed; }
  void check() const;  // throws Error(kLibrary) if it has failed
  // Each of these starts something and returns. ready() is true when it has ended.
  void launch(std::span<const NcclCall> calls);
  void finished();  // the oldest launch is done
  // Gives up kernels in flight, which end soon, in our thread; nobody waits. Idempotent; throws nothing.
  void abort();

 private:
  // Busy (a call is under way) <-> ready. Either may become failed (an error, a deadline); any may become aborted.
  enum class State { kBusy, kReady, kFailed, kAborted };
  class Shared;
  void begin(const char* what, std::function<nccl::Result()> calls);
  void close();

  const std::shared_ptr<Shared> shared_;
  const std::atomic<State>& state_;
  Deadline given_up_by_ = Deadline::never();
  LeavableThread watcher_;
};

}  // namespace farandole
