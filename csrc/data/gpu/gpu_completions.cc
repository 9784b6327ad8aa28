// SPDX-License-Identifier: Apache-2.0
#include "data/gpu/gpu_completions.h"

#include <chrono>
#include <utility>

namespace farandole {
namespace {

// Maximum time for which the destructor waits. The destructor's caller has already waited for the stream, so work that
// still runs will never end, because a peer has died.
constexpr std::chrono::seconds kPatience{5};

}  // namespace

GpuCompletions::GpuCompletions(std::function<void()> ring)
    : queue_(std::make_shared<Queue>(std::move(ring))),
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

void GpuCompletions::watch(std::shared_ptr<GpuEvent> event) {
  {
    std::lock_guard lock(queue_->mutex);
    queue_->waiting.push_back(std::move(event));
  }
  queue_->wake.notify_all();
}

void GpuCompletions::check() const {
  if (!failed()) return;
  std::lock_guard lock(queue_->mutex);
  throw Error(queue_->failure.code, queue_->failure.text);
}

void GpuCompletions::run(Queue& queue) {
  std::unique_lock lock(queue.mutex);
  for (;;) {
    queue.wake.wait(lock, [&] { return queue.quit || !queue.waiting.empty(); });
    if (queue.quit) return;
    std::shared_ptr<GpuEvent> next = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    lock.unlock();
    Failure failure;
    try {
      next->wait();
    } catch (const Error& error) {
      failure = {error.code(), error.what()};
    }
    next.reset();
    lock.lock();
    if (queue.quit) return;  // the object that ring() uses may have been destroyed
    if (failure) {
      queue.failure = std::move(failure);
      queue.failed = true;
    } else {
      ++queue.past;
    }
    lock.unlock();
    queue.ring();
    lock.lock();
  }
}

}  // namespace farandole
