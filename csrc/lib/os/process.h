// SPDX-License-Identifier: Apache-2.0
// What the kernel knows about this host's processes: whether they live or are stopped, and namespaces.
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
  // Opens the process that started at `start_time`; throws kPeer if it is gone. nullopt: the kernel or a
  // sandbox does not support pidfds.
  static std::optional<PidFd> open(pid_t pid, uint64_t start_time);

  bool exited() const;
  int fd() const { return fd_.get(); }  // for poll: POLLIN once the process has ended

 private:
  explicit PidFd(Fd fd) : fd_(std::move(fd)) {}
  Fd fd_;
};

// Clock ticks after boot (field 22 of its stat); nullopt: no such process.
std::optional<uint64_t> process_start_time(pid_t pid);

// Whether a signal or a debugger has stopped it: alive, but not going to answer.
bool is_stopped(pid_t pid);

// The number of cores that these processes may use together, at least 1; 0 is the calling thread. One that has ended counts for
// nothing.
int cores_of(std::span<const pid_t> processes);

// Inode of the PID namespace; ranks may compare process numbers only if theirs are equal. 0: unknown.
uint64_t pid_namespace();

// Inode of the calling thread's network namespace; loopback addresses are those of one. 0: unknown.
uint64_t net_namespace();

std::string host_name();

// Differs between hosts and between boots; empty: unknown.
std::string boot_id();

}  // namespace farandole
