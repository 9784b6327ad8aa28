// SPDX-License-Identifier: Apache-2.0
// Implements farandole_end_after(). While a Watchdog exists, it ends this process at a deadline or when an awaited
// process exits.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "lib/os/process.h"
#include "lib/os/thread.h"
#include "runtime/exit_latch.h"

namespace farandole {

class Watchdog {
 public:
  struct Awaited {
    PidFd process;
    std::string text;  // printed if `process` exits first
  };

  Watchdog(Deadline deadline, std::string text, std::vector<Awaited> awaited)
      : awaited_(std::move(awaited)),
        thread_(start_thread("farandole-limit",
                             [this, deadline, line = std::move(text)] { watch(deadline, line); })) {
  }
  ~Watchdog() {
    over_.tell();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  static constexpr std::chrono::milliseconds kPause{250};  // time between two checks

  void watch(Deadline deadline, const std::string& text) const {
    while (!deadline.expired()) {
      const Deadline pause = awaited_.empty() ? deadline : std::min(deadline, Deadline::in(kPause));
      if (over_.await(pause)) return;
      for (const Awaited& other : awaited_) {
        if (other.process.exited()) end(other.text);
      }
    }
    end(text);
  }

  [[noreturn]] static void end(const std::string& text) {
    const std::string line = text + "\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
    _exit(1);
  }

  ExitLatch over_;
  const std::vector<Awaited> awaited_;
  Thread thread_;
};

}  // namespace farandole
