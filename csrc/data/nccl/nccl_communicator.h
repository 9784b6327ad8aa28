// SPDX-License-Identifier: Apache-2.0
// A blocking NCCL communicator and its two threads. One thread makes NCCL's calls. The other watches the communicator
// and aborts it.
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
    std::chrono::nanoseconds open_timeout;  // time limit for any call
    std::chrono::nanoseconds work_timeout;  // time limit for launched work; 0 means none
    std::function<void()> changed;          // wakes the driver; called from both threads
  };
  NcclCommunicator(Setup setup, const nccl::UniqueId& id);
  // Closes a communicator that is idle and healthy. Aborts any other communicator and waits for a few seconds. If NCCL
  // has not returned by then, the threads stay in NCCL and keep the device until the process ends.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // ---- Driver only
  bool ready() const { return state_ == State::kReady; }  // true if the next call may start
  bool failed() const { return state_ == State::kFailed; }
  void check() const;  // throws Error(kLibrary) if the communicator has failed
  // Starts the calls and returns. ready() becomes true when the calls have returned.
  void launch(std::span<const NcclCall> calls);
  void finished();  // must be called when the oldest launch is done
  // Makes the watcher abort the kernels in flight, so that they end soon. Neither waits nor throws.
  void abort();

 private:
  // A communicator alternates between busy (a call is under way) and ready. In both states, an error or a deadline
  // makes it failed. In every state, abort() makes it aborted.
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
