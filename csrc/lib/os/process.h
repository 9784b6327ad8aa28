// SPDX-License-Identifier: Apache-2.0
// The kernel's knowledge of this host's processes: alive, stopped, namespaces, cores.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "lib/os/fd.h"

namespace farandole {

// A reference to a process that stays valid when its number is reused.
class PidFd {
 public:
  // Opens the process that started at `start_time`; throws kPeer if it is gone. nullopt: pidfds are not supported here.
  static std::optional<PidFd> open(pid_t pid, uint64_t start_time);

  bool exited() const;
  int fd() const { return fd_.get(); }  // for poll(): POLLIN when the process has ended

 private:
  explicit PidFd(Fd fd) : fd_(std::move(fd)) {}
  Fd fd_;
};

// Start in clock ticks after boot (field 22 of its stat); nullopt: no such process.
std::optional<uint64_t> process_start_time(pid_t pid);

// True if a signal or a debugger has stopped the process: it lives but will not answer.
bool is_stopped(pid_t pid);

// Number of cores that these processes may use together, at least 1. 0 is the calling thread; ended ones do not count.
int cores_of(std::span<const pid_t> processes);

// Inode of the PID namespace. Ranks may compare process numbers only if it is equal. 0: unknown.
uint64_t pid_namespace();

// Inode of the calling thread's network namespace, to which loopback addresses belong. 0: unknown.
uint64_t net_namespace();

std::string host_name();

// Differs between hosts and between boots. Empty: unknown.
std::string boot_id();

}  // namespace farandole
