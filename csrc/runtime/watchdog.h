// SPDX-License-Identifier: Apache-2.0
// Ends the process with a line on stderr unless destroyed before a deadline. Guards calls into code that may
// block for ever and can't be interrupted.
#pragma once

#include <unistd.h>

#include <string>
#include <thread>

#include "lib/os/thread.h"
#include "runtime/exit_latch.h"

namespace farandole {

class Watchdog {
 public:
  Watchdog(Deadline deadline, std::string text)
      : thread_(start_thread("farandole-limit", [this, deadline, line = std::move(text) + "\n"] {
          if (over_.await(deadline)) return;
          [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
          _exit(1);
        })) {}
  ~Watchdog() {
    over_.tell();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  ExitLatch over_;
  std::thread thread_;
};

}  // namespace farandole
