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
#include "lib/gpu/gpu_window.h"
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
  NcclCommunicator(Setup setup, nccl::Comm part);  // of another communicator that was split
  // Destroys it if all is well and nothing is in flight, else aborts it, and waits a few seconds for that. If NCCL does
  // not return by then, our threads stay in it, with the device and the windows, until the process ends.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // ---- the driver
  bool ready() const { return state_ == State::kReady; }  // the next call may come
  bool failed() const { return state_ == State::kFailed; }
  void check() const;  // throws Error(kLibrary) if it has failed
  // Each of these begins something and returns; ready() tells when it has ended.
  void launch(std::span<const NcclCall> calls);
  // Registers these windows before the first bucket that is reduced in them: called by every member at the same point of
  // the log.
  void know(std::span<const std::shared_ptr<GpuWindow>> windows);
  bool knows(uint32_t window) const;
  std::vector<uint32_t> closed_windows() const;
  // Called by every member at the same point of the log, with nothing in flight. The window's memory may be freed after it.
  void forget(uint32_t window);
  // Makes another communicator of some members: called by every member at the same point of the log, with nothing in
  // flight. `member`: our number in the new one; -1: we are not in it. Once ready(), take_part() hands it over, or nullptr.
  void split(int member);
  nccl::Comm take_part();

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
  bool is_in_part_ = false;  // of the split
  Deadline given_up_by_ = Deadline::never();
  LeavableThread watcher_;
};

}  // namespace farandole
