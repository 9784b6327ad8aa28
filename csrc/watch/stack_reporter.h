// SPDX-License-Identifier: Apache-2.0
// Reports Python's stacks and the states of this process's threads when other ranks wait for this rank. If native code
// holds Python's GIL, the report has only the main thread's stack.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lib/os/thread.h"

namespace farandole {

// The arguments of farandole_stacks().
struct StackSource {
  int socket = -1;
  int signal = 0;
  int pipe = -1;
};

// Returns the highest real-time signal that has no handler, or 0 if all have one.
int free_signal();

// Gives a signal without a handler an empty one. Python restores it at exit, so a late signal does not end the process.
void make_harmless(int signal);

// Returns the line numbers of the `for` and `while` statements around line `number` of a Python source, outermost
// first. Lines are counted from 1.
std::vector<size_t> loops_around(const std::string& source, size_t number);

class StackReporter {
 public:
  explicit StackReporter(StackSource source) : source_(std::move(source)) {}
  ~StackReporter();
  StackReporter(const StackReporter&) = delete;
  StackReporter& operator=(const StackReporter&) = delete;

  struct Stacks {
    std::string text;         // at most 4 KB
    bool main_alone = false;  // true if no other thread runs Python code that may make calls
  };
  // Starts a report and returns at once. A new thread calls `tell`, at the latest after about a second. Does nothing
  // while an earlier report is in progress. If `with_loops` is true, also reads the sources of the user's frames and
  // names the lines of the loops that enclose each frame's line. May be called from any thread.
  void ask(bool with_loops, std::function<void(Stacks)> tell);

 private:
  const StackSource source_;
  std::mutex mutex_;
  bool busy_ = false;
  Thread thread_;
};

}  // namespace farandole
