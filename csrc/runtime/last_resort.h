// SPDX-License-Identifier: Apache-2.0
// Ends the process with a line on stderr, unless what it guards ends in time: for calls that block for ever
// in code that nothing can interrupt.
#pragma once

#include <unistd.h>

#include <string>
#include <thread>

#include "lib/os/thread.h"
#include "runtime/departure.h"

namespace farandole {

class LastResort {
 public:
  LastResort(Deadline deadline, std::string text)
      : thread_(start_thread("farandole-limit", [this, deadline, line = std::move(text) + "\n"] {
          if (over_.await(deadline)) return;
          [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
          _exit(1);
        })) {}
  ~LastResort() {
    over_.tell();
    thread_.join();
  }
  LastResort(const LastResort&) = delete;
  LastResort& operator=(const LastResort&) = delete;

 private:
  Departure over_;
  std::thread thread_;
};

}  // namespace farandole
