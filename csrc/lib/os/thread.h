// SPDX-License-Identifier: Apache-2.0
// Starts the core's threads: named, with all signals blocked, because signals belong to the user's threads.
#pragma once

#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace farandole {

// A thread of the core. join() it before its destruction.
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
  int simulated_ = 0;  // its number in the simulation
};

// Longer names are cut to 15 characters, the kernel's limit.
Thread start_thread(const std::string& name, std::function<void()> run);

// A thread that may hang for ever in a foreign library. From then on it must use nothing of its owner's.
class LeavableThread {
 public:
  LeavableThread(const std::string& name, std::function<void()> run);
  // Waits until the deadline for its end, then abandons it; the process may end before it.
  void join_or_leave(Deadline deadline);

 private:
  std::future<void> ended_;
  Thread thread_;
};

// True on the thread with which the process started.
bool is_main_thread();

// Asks for short scheduler slices (100 us), so this thread soon preempts computing ones. Older kernels ignore that.
void ask_for_short_slice();

// Lets this thread's timed sleeps end on time. By default the kernel may add 50 us to each.
void ask_for_punctual_sleeps();

// Lets this thread preempt all normal ones: lowest SCHED_RR. Keeps a policy chosen by the user. False: not permitted.
bool ask_for_real_time();

}  // namespace farandole
