// SPDX-License-Identifier: Apache-2.0
// Says where this process is when others wait for it: Python's stacks, and what the kernel knows of its
// threads. Works while the main thread is stuck in native code.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace farandole {

// Makes Python write the stacks of its threads: at `signal`, the main thread writes them to a pipe, whose
// other end, which never blocks, is `pipe`. Belongs to the process, for its whole life.
struct StackSource {
  int signal = 0;  // 0: none
  int pipe = -1;
};

// The first real-time signal from the top on that nobody handles; 0: none is free.
int free_signal();

// Gives a signal that nobody handles a handler that does nothing. Python's comes over it and, when Python
// goes, leaves it behind: a signal that is on its way then ends no process.
void make_harmless(int signal);

// What /proc says of the main thread and of the other threads that are not ours; a line each.
std::string thread_states();

// All of it, in at most a second and about 4 KB.
std::string whereabouts(const StackSource& source);

class Witness {
 public:
  explicit Witness(StackSource source) : source_(source) {}
  ~Witness();
  Witness(const Witness&) = delete;
  Witness& operator=(const Witness&) = delete;

  // Any thread, returns at once. `tell` is called on another thread; not at all if one is at it already.
  void ask(std::function<void(std::string)> tell);

 private:
  const StackSource source_;
  std::mutex mutex_;
  bool busy_ = false;
  std::thread thread_;
};

}  // namespace farandole
