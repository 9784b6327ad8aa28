// SPDX-License-Identifier: Apache-2.0
// One NCCL communicator: opened or split off without blocking, watched by a thread of its own, aborted on any error.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/clock.h"
#include "lib/gpu/gpu_device.h"
#include "lib/gpu/gpu_window.h"
#include "lib/gpu/nccl.h"

namespace farandole {

class NcclCommunicator {
 public:
  struct Setup {
    std::shared_ptr<const nccl::Api> api;
    std::shared_ptr<GpuDevice> device;
    nccl::UniqueId id;
    int member;
    int members;
    std::chrono::nanoseconds open_timeout;  // and for connections made by a first launch
    std::chrono::nanoseconds work_timeout;  // for launched work; 0: never
    std::function<void()> changed;          // rings the driver's bell; from our thread
    nccl::Comm part = nullptr;  // of another communicator that was split; else a new one with `id`
  };
  explicit NcclCommunicator(Setup setup);
  // Destroys it if all is well and nothing is in flight, else aborts it.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // ---- the driver
  bool ready() const { return state_ == State::kReady; }
  bool failed() const { return state_ == State::kFailed; }
  void check() const;  // throws what our thread found
  nccl::Comm get() const { return comm_; }
  // After a group of calls: NCCL may still be connecting; then ready() is false for a while.
  void launched(nccl::Result result);
  // Before the first bucket that is reduced in this window: every member, at the same point of the log. ready() may
  // be false for a while.
  void know(const std::shared_ptr<GpuWindow>& window);
  void finished();  // the oldest launch has come to its end
  // A part of it becomes another communicator: every member, at the same point of the log and with nothing in flight.
  // `member`: our number in the part; -1: we are not in it. ready() is false for a while; then take_part().
  void split(int member);
  nccl::Comm take_part();
  // Kernels in flight end at once. Idempotent.
  void abort();
  // An operator that sums weight * input. Kept for the next time.
  nccl::RedOp weighted(double weight, nccl::DataType type);

 private:
  enum class State { kConnecting, kReady, kFailed, kAborted };
  void watch();
  Deadline look();  // when to look again
  void wake();
  void fail(const std::string& text);
  void connecting(nccl::Result result);
  void forget_windows(bool all);
  void close();

  // What NCCL gave for a window of ours; one of the two, or neither where this hardware has no use for it.
  struct Registration {
    std::shared_ptr<GpuWindow> window;
    nccl::Window as_window = nullptr;
    void* as_buffer = nullptr;
  };

  const Setup setup_;
  nccl::Comm comm_ = nullptr;
  nccl::Comm part_ = nullptr;  // nobody's until it is taken; sound once we are ready
  std::map<std::pair<double, nccl::DataType>, nccl::RedOp> weighted_;
  std::map<uint32_t, Registration> windows_;  // at fixed places: NCCL may fill them in later
  std::atomic<State> state_{State::kConnecting};

  mutable std::mutex mutex_;
  Deadline connected_by_;
  int in_flight_ = 0;
  Deadline done_by_ = Deadline::never();
  std::string failure_;
  std::atomic<bool> quit_{false};
  std::atomic<uint32_t> news_{0};  // what our thread sleeps on
  std::thread thread_;
};

}  // namespace farandole
