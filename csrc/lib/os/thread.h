// SPDX-License-Identifier: Apache-2.0
// Starts the core's own threads: named, with all signals blocked (signals belong to the user's threads).
#pragma once

#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace farandole {

// A thread of the core; join() it before it goes.
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
  int simulated_ = 0;  // its number there
};

// The kernel allows 15 characters; a longer `name` is cut.
Thread start_thread(const std::string& name, std::function<void()> run);

// A thread that may hang for ever in a library of others. Once it may, it must use nothing of its owner's.
class LeavableThread {
 public:
  LeavableThread(const std::string& name, std::function<void()> run);
  // Waits for its end until the deadline. Then it is left alone: the process may end before it.
  void join_or_leave(Deadline deadline);

 private:
  std::future<void> ended_;
  Thread thread_;
};

// True on the thread that the process began with.
bool is_main_thread();

// Asks the scheduler for a short slice (100 us) at normal priority, so that this thread soon preempts
// computing ones. Older kernels ignore it.
void ask_for_short_slice();

// Lets this thread's timed sleeps end on time: by default the kernel may add 50 us to each.
void ask_for_punctual_sleeps();

// Lets this thread preempt all normal ones: SCHED_RR at its lowest priority. False: not permitted. A policy
// that the user chose is kept.
bool ask_for_real_time();

}  // namespace farandole
