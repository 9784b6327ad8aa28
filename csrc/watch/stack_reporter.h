// SPDX-License-Identifier: Apache-2.0
// Reports what this process is doing when others wait for it: Python's stacks, and the kernel's data of its threads.
// Works even if the main thread is stuck in native code.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lib/os/thread.h"

namespace farandole {

// Source of Python's stacks: on `signal`, Python writes them to a pipe. `pipe`: its non-blocking read end.
struct StackSource {
  int signal = 0;  // 0: none
  int pipe = -1;
  std::vector<std::string> own_folders;  // frames in these are left out on top of a stack
};

// The highest real-time signal without a handler; 0: none.
int free_signal();

// Gives a signal without handler an empty one, which Python's handler restores on exit, for late signals.
void make_harmless(int signal);

// Lines of the `for` and `while` statements around line `number` (from 1) of a Python source, outermost first.
std::vector<size_t> loops_around(const std::string& source, size_t number);

class StackReporter {
 public:
  explicit StackReporter(StackSource source) : source_(std::move(source)) {}
  ~StackReporter();
  StackReporter(const StackReporter&) = delete;
  StackReporter& operator=(const StackReporter&) = delete;

  struct Stacks {
    std::string text;         // at most 4 KB
    bool main_alone = false;  // no other thread runs Python code that may make calls
  };
  // Any thread; returns at once. Calls `tell` on another thread in about a second, unless a report is under way.
  // `with_loops`: also reads the sources of the user's frames, to add the loops around them.
  void ask(bool with_loops, std::function<void(Stacks)> tell);

 private:
  const StackSource source_;
  std::mutex mutex_;
  bool busy_ = false;
  Thread thread_;
};

}  // namespace farandole
