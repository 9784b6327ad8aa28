// SPDX-License-Identifier: Apache-2.0
// Asks the kernel about processes of this host: alive or stopped, namespaces, cores.
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
  // Opens the process that started at `start_time`. Throws Error(kPeer) if it has ended. nullopt: no pidfds here.
  static std::optional<PidFd> open(pid_t pid, uint64_t start_time);

  bool exited() const;
  int fd() const { return fd_.get(); }  // for poll(): POLLIN when the process has ended

 private:
  explicit PidFd(Fd fd) : fd_(std::move(fd)) {}
  Fd fd_;
};

// Start of the process in clock ticks after boot (field 22 of its stat); nullopt: no such process.
std::optional<uint64_t> process_start_time(pid_t pid);

// True if a signal or a debugger has stopped the process: it has not ended, but cannot answer.
bool is_stopped(pid_t pid);

// Number of cores that these processes may use together, at least 1. PID 0: the calling thread. Skips ended processes.
int cores_of(std::span<const pid_t> processes);

// Inode of the PID namespace; 0: unknown. Ranks may compare process numbers only if these inodes are equal.
uint64_t pid_namespace();

// Inode of the calling thread's network namespace; each has its own loopback addresses. 0: unknown.
uint64_t net_namespace();

std::string host_name();

// The kernel's id of this host and boot. Empty: unknown.
std::string boot_id();

}  // namespace farandole
