// SPDX-License-Identifier: Apache-2.0
// Starts the core's threads. Each has a name and blocks all signals, so that only the user's threads handle signals.
#pragma once

#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace farandole {

// A thread of the core. Call join() or detach() before the thread object is destroyed.
class Thread {
 public:
  Thread() = default;
  explicit Thread(std::thread thread) : thread_(std::move(thread)) {}
  explicit Thread(int simulated) : simulated_(simulated) {}
  bool joinable() const { return thread_.joinable() || simulated_ > 0; }
  void join();
  void detach() { thread_.detach(); }

 private:
  std::thread thread_;
  int simulated_ = 0;  // number of the thread in the simulation; 0 for a real thread
};

// Starts a thread. Cuts the name to 15 characters, which is the kernel's limit.
Thread start_thread(const std::string& name, std::function<void()> run);

// A thread that may hang for ever in a foreign library. Once abandoned, it must not use its owner's data.
class LeavableThread {
 public:
  LeavableThread(const std::string& name, std::function<void()> run);
  // Waits for the thread until the deadline, then abandons it and returns false. The process may exit while an
  // abandoned thread is still running.
  bool join_or_leave(Deadline deadline);

 private:
  std::future<void> ended_;
  Thread thread_;
};

bool is_main_thread();

// Asks for scheduler slices of 100 us, so that this thread soon preempts computing threads. Older kernels ignore this.
void ask_for_short_slice();

// Makes this thread's sleeps end on time. By default, the kernel may extend them by 50 us.
void ask_for_punctual_sleeps();

// Makes this thread preempt all normal threads: gives it the lowest SCHED_RR priority, unless the user has chosen a
// policy. Returns false if that is not permitted.
bool ask_for_real_time();

}  // namespace farandole
