// SPDX-License-Identifier: Apache-2.0
// Asks the kernel about processes of this host: if they are alive or stopped, their namespaces and their cores.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "lib/os/fd.h"

namespace farandole {

// A reference to a process. The reference stays correct when the kernel reuses the process's number.
class PidFd {
 public:
  // Opens the process that started at `start_time`. Throws Error(kPeer) if the process has ended. Returns nullopt if
  // the kernel does not support pidfds.
  static std::optional<PidFd> open(pid_t pid, uint64_t start_time);

  bool exited() const;
  int fd() const { return fd_.get(); }  // for poll(): POLLIN when the process has ended

 private:
  explicit PidFd(Fd fd) : fd_(std::move(fd)) {}
  Fd fd_;
};

// Returns the start of the process in clock ticks since boot (field 22 of its stat), or nullopt if it does not exist.
std::optional<uint64_t> process_start_time(pid_t pid);

// True if a signal or a debugger has stopped the process. A stopped process has not ended, but cannot answer.
bool is_stopped(pid_t pid);

// Returns the number of cores that these processes may use together, but at least 1. PID 0 stands for the calling
// thread. Skips processes that have ended.
int cores_of(std::span<const pid_t> processes);

// Returns the PID namespace's inode, or 0 if it is unknown. Ranks may compare process numbers only if it is the same.
uint64_t pid_namespace();

// Returns the inode of the thread's network namespace, which has its own loopback addresses, or 0 if it is unknown.
uint64_t net_namespace();

std::string host_name();

// Returns the kernel's id of this host and boot, or "" if it is unknown.
std::string boot_id();

}  // namespace farandole
