// SPDX-License-Identifier: Apache-2.0
// See gpu_completions.h. Used by the launch lane and the staged backend: the driver hands events over, our thread
// waits.
#include "data/gpu/gpu_completions.h"

#include <chrono>
#include <utility>

namespace farandole {
namespace {

// Whoever ends us has waited for the stream before. Work that still does not end never will: its peer is dead.
constexpr std::chrono::seconds kPatience{5};

}  // namespace

GpuCompletions::GpuCompletions()
    : queue_(std::make_shared<Queue>()),
      thread_("farandole-gpu", [queue = queue_] { run(*queue); }) {}

GpuCompletions::~GpuCompletions() {
  {
    std::lock_guard lock(queue_->mutex);
    queue_->quit = true;
    queue_->waiting.clear();
  }
  queue_->wake.notify_all();
  thread_.join_or_leave(Deadline::in(kPatience));
}

void GpuCompletions::watch(std::shared_ptr<GpuEvent> event, std::function<void(Failure)> then) {
  {
    std::lock_guard lock(queue_->mutex);
    queue_->waiting.push_back({std::move(event), std::move(then)});
  }
  queue_->wake.notify_all();
}

void GpuCompletions::run(Queue& queue) {
  std::unique_lock lock(queue.mutex);
  for (;;) {
    queue.wake.wait(lock, [&] { return queue.quit || !queue.waiting.empty(); });
    if (queue.quit) return;
    Watched next = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    lock.unlock();
    Failure failure;
    try {
      next.event->wait();
    } catch (const Error& error) {
      failure = {error.code(), error.what()};
    }
    lock.lock();
    if (queue.quit) return;  // whom `then` would tell may be gone
    lock.unlock();
    next.then(std::move(failure));
    next = {};
    lock.lock();
  }
}

}  // namespace farandole
