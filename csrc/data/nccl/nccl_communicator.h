// SPDX-License-Identifier: Apache-2.0
// One NCCL communicator: opened or split off without blocking, watched by a thread of its own, aborted on any error. All
// calls of NCCL that take it are made here, under one mutex: NCCL allows one thread at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
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
    std::chrono::nanoseconds open_timeout;  // of whatever NCCL goes on with by itself
    std::chrono::nanoseconds work_timeout;  // for launched work; 0: never
    std::function<void()> changed;          // wakes the driver; from our thread
  };
  NcclCommunicator(Setup setup, const nccl::UniqueId& id);
  NcclCommunicator(Setup setup, nccl::Comm part);  // of another communicator that was split
  // Destroys it if all is well and nothing is in flight, else aborts it, and waits a few seconds for that. If NCCL does
  // not return by then, our thread stays in it, with the device and the windows, until the process ends.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // ---- the driver
  // Nothing goes on that a call has begun: the next may come.
  bool ready() const { return state_ == State::kReady; }
  bool poll();  // the same, after asking NCCL
  Deadline look_again()
      const;  // when to call poll() again; never: our thread asks, and wakes the driver
  bool failed() const { return state_ == State::kFailed; }
  void check() const;  // throws Error(kLibrary) if it has failed
  // Each of these may begin something that NCCL goes on with, whatever it returns; ready() tells when it has ended.
  void launch(std::span<const NcclCall> calls);
  // Registers these windows before the first bucket that is reduced in them: called by every member at the same point of
  // the log.
  void know(std::span<const std::shared_ptr<GpuWindow>> windows);
  bool knows(uint32_t window) const { return held_->windows.contains(window); }
  std::vector<uint32_t> closed_windows() const;
  // Called by every member at the same point of the log, with nothing in flight. The window's memory may be freed after it.
  void forget(uint32_t window);
  // Makes another communicator of some members: called by every member at the same point of the log, with nothing in
  // flight. `member`: our number in the new one; -1: we are not in it. Once ready(), take_part()
  // hands it over, or nullptr.
  void split(int member);
  nccl::Comm take_part();

  void finished();  // the oldest launch has come to its end
  // Gives up kernels in flight, which end soon: NCCL does it in our thread, while nobody waits. Idempotent; throws nothing.
  void abort();

 private:
  enum class State { kBusy, kReady, kFailed, kAborted };
  // What NCCL returned for a window: one of the two handles, or neither where this hardware has no use for registration.
  struct Registration {
    std::shared_ptr<GpuWindow> window;
    nccl::Window as_window = nullptr;
    void* as_buffer = nullptr;
  };

  // What NCCL uses, or sets later, in threads of its own; so it lives until an abort has returned.
  struct Held {
    nccl::Comm part = nullptr;                 // until taken; set after the split
    std::map<uint32_t, Registration> windows;  // a map, because the handles are set in place
    bool given_up = false;
  };
  static void give_up(const nccl::Api& api, const GpuDevice& device, nccl::Comm comm, Held& held);

  // What a call has begun and NCCL's own thread goes on with.
  struct Busy {
    Deadline ready_by;  // later it is an error
    int64_t begun_ns = now_ns();
    std::atomic<bool> watched{true};  // our thread polls, not the driver
    bool awaits_part = false;
    bool is_in_part = false;
  };
  struct Flight {
    int launches = 0;
    Deadline done_by = Deadline::never();
    bool fresh = false;  // something was launched since our thread has looked
  };

  template <class Calls>
  void begin(Calls&& calls);
  nccl::Result call(const NcclCall& call);
  void add_operator(const NcclCall& call);
  void look();
  void watch();
  Deadline next_look();
  void wake();
  void fail(const std::string& text);
  void deregister(const Registration& known);
  void close();

  const Setup setup_;
  std::atomic<State> state_{State::kBusy};

  mutable std::mutex mutex_;
  const nccl::Comm comm_;
  const std::shared_ptr<Held> held_;
  std::map<std::pair<double, nccl::DataType>, nccl::RedOp> weighted_;
  Busy busy_;
  std::optional<Deadline> fails_by_;  // since NCCL has said so
  Flight flight_;
  bool asleep_ = false;  // our thread, until it is woken
  std::string failure_;
  std::atomic<bool> quit_{false};
  std::atomic<uint32_t> news_{0};  // what our thread sleeps on
  Deadline given_up_by_ = Deadline::never();
  LeavableThread thread_;
};

}  // namespace farandole
