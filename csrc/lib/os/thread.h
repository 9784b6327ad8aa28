// SPDX-License-Identifier: Apache-2.0
// Starts the core's threads, which have names. They block all signals, so that the user's threads handle all signals.
#pragma once

#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace farandole {

// A thread of the core. Call join() or detach() before its destructor.
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
  int simulated_ = 0;  // number in the simulation; 0: a real thread
};

// Cuts the name to 15 characters, the kernel's limit.
Thread start_thread(const std::string& name, std::function<void()> run);

// A thread that may hang for ever in a foreign library. Once abandoned, the thread must not use its owner's data.
class LeavableThread {
 public:
  LeavableThread(const std::string& name, std::function<void()> run);
  // Waits for the thread until the deadline, then abandons it; the process may exit while it runs. False: abandoned.
  bool join_or_leave(Deadline deadline);

 private:
  std::future<void> ended_;
  Thread thread_;
};

bool is_main_thread();

// Asks for scheduler slices of 100 us, so that this thread soon preempts computing threads. Older kernels ignore it.
void ask_for_short_slice();

// Lets this thread's sleeps end on time. By default the kernel may add 50 us.
void ask_for_punctual_sleeps();

// Lets this thread preempt all normal threads: sets the lowest SCHED_RR priority, unless the user has chosen a policy.
// False: not permitted.
bool ask_for_real_time();

}  // namespace farandole
