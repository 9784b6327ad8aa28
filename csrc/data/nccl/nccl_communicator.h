// SPDX-License-Identifier: Apache-2.0
// One NCCL communicator, a blocking one: a thread of its own makes NCCL's calls, another one watches it and aborts it.
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
    std::chrono::nanoseconds open_timeout;  // of any call
    std::chrono::nanoseconds work_timeout;  // for launched work; 0: never
    std::function<void()> changed;          // wakes the driver; from our threads
  };
  NcclCommunicator(Setup setup, const nccl::UniqueId& id);
  // Destroys it if all is well and nothing is in flight, else aborts it, and waits a few seconds for that. If NCCL does
  // not return by then, our threads stay in it, with the device, until the process ends.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // ---- the driver
  bool ready() const { return state_ == State::kReady; }  // the next call may come
  bool failed() const { return state_ == State::kFailed; }
  void check() const;  // throws Error(kLibrary) if it has failed
  // Each of these begins something and returns; ready() tells when it has ended.
  void launch(std::span<const NcclCall> calls);
  void finished();  // the oldest launch has come to its end
  // Gives up kernels in flight, which end soon: NCCL does it in our thread, while nobody waits. Idempotent; throws nothing.
  void abort();

 private:
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
