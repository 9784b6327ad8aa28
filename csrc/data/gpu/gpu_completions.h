// SPDX-License-Identifier: Apache-2.0
// The thread that sleeps on a GPU's events, in the order in which they were handed over.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "base/error.h"
#include "lib/gpu/gpu_device.h"
#include "lib/os/thread.h"

namespace farandole {

class GpuCompletions {
 public:
  GpuCompletions();
  // Waits until the event that it sleeps on has fired, for a few seconds at most; those behind it are dropped.
  ~GpuCompletions();
  GpuCompletions(const GpuCompletions&) = delete;
  GpuCompletions& operator=(const GpuCompletions&) = delete;

  // Any thread. `then` runs on our thread; its failure is set if the device reported one.
  void watch(std::shared_ptr<GpuEvent> event, std::function<void(Failure)> then);

 private:
  struct Watched {
    std::shared_ptr<GpuEvent> event;
    std::function<void(Failure)> then;
  };
  struct Queue {
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<Watched> waiting;
    bool quit = false;
  };
  static void run(Queue& queue);

  const std::shared_ptr<Queue> queue_;  // the thread's too, which may stay behind
  LeavableThread thread_;
};

}  // namespace farandole
