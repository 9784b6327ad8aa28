// SPDX-License-Identifier: Apache-2.0
// Reports what this process is doing when others wait for it: Python's stacks, and what the kernel knows of
// its threads. Works even if the main thread is stuck in native code.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lib/os/thread.h"

namespace farandole {

// How to get Python's stacks: on `signal`, Python writes them to a pipe, whose non-blocking reading end is
// `pipe`. Belongs to the process for its whole life.
struct StackSource {
  int signal = 0;  // 0: none
  int pipe = -1;
  std::vector<std::string> own_folders;  // whose frames are left out on top of a stack
};

// The highest real-time signal that has no handler; 0: none is free.
int free_signal();

// Gives a signal without handler an empty one. Python's handler replaces it and restores it on exit, so that
// a late signal does not end the process.
void make_harmless(int signal);

// Lines of the `for` and `while` statements that line `number` (from 1) of a Python source is in, from the outermost.
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
  // Any thread; returns at once. Calls `tell` on another thread, in about a second; does nothing if a report is being
  // made. `with_loops`: reads the sources of the user's frames, to add the loops they are in.
  void ask(bool with_loops, std::function<void(Stacks)> tell);

 private:
  const StackSource source_;
  std::mutex mutex_;
  bool busy_ = false;
  Thread thread_;
};

}  // namespace farandole
