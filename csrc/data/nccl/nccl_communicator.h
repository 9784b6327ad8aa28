// SPDX-License-Identifier: Apache-2.0
// A blocking NCCL communicator and its two threads: one makes NCCL's calls, one watches and aborts the communicator.
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
    std::chrono::nanoseconds open_timeout;  // limit for any call
    std::chrono::nanoseconds work_timeout;  // limit for launched work; 0: none
    std::function<void()> changed;          // wakes the driver; both threads call it
  };
  NcclCommunicator(Setup setup, const nccl::UniqueId& id);
  // Closes an idle, healthy communicator. Aborts any other, and waits for a few seconds. If NCCL has not returned by
  // then, the threads stay in NCCL, and keep the device, until the process ends.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // ---- Driver only
  bool ready() const { return state_ == State::kReady; }  // true: the next call may start
  bool failed() const { return state_ == State::kFailed; }
  void check() const;  // throws Error(kLibrary) if it has failed
  // Starts the calls and returns. ready() is true when they have returned.
  void launch(std::span<const NcclCall> calls);
  void finished();  // call it when the oldest launch is done
  // Makes the watcher abort kernels in flight, which then end soon. Neither waits nor throws.
  void abort();

 private:
  // Busy (a call is under way) <-> ready. Both may become failed (error or deadline); every state may become aborted.
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
