// SPDX-License-Identifier: Apache-2.0
// See gpu_completions.h. Used by the launch lane and the staged backend: the driver hands events over, our thread
// waits.
#include "data/gpu/gpu_completions.h"

#include <utility>

#include "lib/os/thread.h"

namespace farandole {

GpuCompletions::GpuCompletions() : thread_(start_thread("farandole-gpu", [this] { run(); })) {}

GpuCompletions::~GpuCompletions() {
  {
    std::lock_guard lock(mutex_);
    quit_ = true;
    queue_.clear();
  }
  wake_.notify_all();
  thread_.join();
}

void GpuCompletions::watch(std::shared_ptr<GpuEvent> event, std::function<void(Failure)> then) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back({std::move(event), std::move(then)});
  }
  wake_.notify_all();
}

void GpuCompletions::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return quit_ || !queue_.empty(); });
    if (quit_) return;
    Watched next = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Failure failure;
    try {
      next.event->wait();
    } catch (const Error& error) {
      failure = {error.code(), error.what()};
    }
    next.then(std::move(failure));
    next = {};
    lock.lock();
  }
}

}  // namespace farandole
