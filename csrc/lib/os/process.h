// SPDX-License-Identifier: Apache-2.0
// What the kernel knows about the processes of this host: whether they live, stand still, or are others.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "lib/os/fd.h"

namespace farandole {

// A process that cannot be mistaken for a later one of the same number.
class PidFd {
 public:
  // nullopt: the kernel or a sandbox does not offer pidfds. Throws kPeer if that process (the one that
  // started at `start_time`) is gone.
  static std::optional<PidFd> open(pid_t pid, uint64_t start_time);

  bool exited() const;
  int fd() const { return fd_.get(); }  // for poll: POLLIN once the process has ended

 private:
  explicit PidFd(Fd fd) : fd_(std::move(fd)) {}
  Fd fd_;
};

// Clock ticks after boot (field 22 of /proc/PID/stat); nullopt: no such process.
std::optional<uint64_t> process_start_time(pid_t pid);

// Stopped by a signal or a debugger: alive, and not going to answer.
bool is_stopped(pid_t pid);

// Two ranks may compare process numbers only if these are equal. 0: unknown.
uint64_t pid_namespace();

// Of the calling thread. Sockets without a file reach no other one. 0: unknown.
uint64_t net_namespace();

std::string host_name();

// Differs between hosts and between boots; empty: unknown.
std::string boot_id();

}  // namespace farandole
