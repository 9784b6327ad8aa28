// SPDX-License-Identifier: Apache-2.0
// A thread that waits for a GPU's events, in the order of the watch() calls.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "lib/gpu/gpu_device.h"
#include "lib/os/thread.h"

namespace farandole {

class GpuCompletions {
 public:
  // `ring` wakes the driver. The watching thread calls `ring` after each event.
  explicit GpuCompletions(std::function<void()> ring);
  // Waits for the current event, but at most a few seconds, and drops the other events.
  ~GpuCompletions();
  GpuCompletions(const GpuCompletions&) = delete;
  GpuCompletions& operator=(const GpuCompletions&) = delete;

  // ---- Any thread
  void watch(std::shared_ptr<GpuEvent> event);
  uint64_t past() const { return queue_->past; }  // number of events that have fired
  bool failed() const { return queue_->failed; }  // true if the device has reported a failure
  void check() const;                             // throws the failure, if any

 private:
  struct Queue {
    explicit Queue(std::function<void()> its_ring) : ring(std::move(its_ring)) {}
    const std::function<void()> ring;
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::shared_ptr<GpuEvent>> waiting;
    bool quit = false;
    Failure failure;
    std::atomic<uint64_t> past{0};
    std::atomic<bool> failed{false};
  };
  static void run(Queue& queue);

  const std::shared_ptr<Queue> queue_;  // shared with the thread, which may outlive this object
  LeavableThread thread_;
};

}  // namespace farandole
