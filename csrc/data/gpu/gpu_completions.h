// SPDX-License-Identifier: Apache-2.0
// The thread that sleeps on a GPU's events, in the order in which they were handed over.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "lib/gpu/gpu_device.h"

namespace farandole {

class GpuCompletions {
 public:
  GpuCompletions();
  // Waits until the event that it sleeps on has fired; those behind it are dropped.
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
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Watched> queue_;
  bool quit_ = false;
  std::thread thread_;
};

}  // namespace farandole
