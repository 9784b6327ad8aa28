// SPDX-License-Identifier: Apache-2.0
// Messages and file descriptors between the ranks of one host, over abstract Unix sockets (no file). Only
// processes of the same user that know the job's key are accepted.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "lib/ipc/guarded_listener.h"
#include "lib/os/fd.h"

namespace farandole {

using JobKey = std::array<std::byte, 16>;

// From the kernel's random generator, for names and nonces.
JobKey random_key();

// In constant time, so that timing reveals nothing of the expected one.
bool equal_keys(std::span<const std::byte> shown, std::span<const std::byte> expected);

struct UnixMessage {
  std::vector<std::byte> bytes;
  std::vector<Fd> fds;
};

// One connection. Every call throws kStall when its deadline passes and kPeer when the peer has closed.
class UnixSocket {
 public:
  static constexpr size_t kMaxBytes = 64 * 1024;  // of one message
  static constexpr size_t kMaxFds = 64;

  // Sends the key at once and does not wait for accept(): a refusal shows in the next receive().
  static UnixSocket connect(const std::string& name, const JobKey& key, Deadline deadline);
  explicit UnixSocket(Fd fd) : fd_(std::move(fd)) {}

  // Sends one whole message; `bytes` must not be empty. The descriptors remain the sender's.
  void send(std::span<const std::byte> bytes, std::span<const int> fds, Deadline deadline);
  UnixMessage receive(Deadline deadline);

  int fd() const { return fd_.get(); }  // for poll: POLLHUP when the peer has closed

 private:
  Fd fd_;
};

class UnixListener {
  struct Unproved {
    Fd fd;
  };

 public:
  UnixListener();

  const std::string& name() const { return name_; }  // random; peers need it to connect

  // The next peer that has sent the right key. Others are closed: at once if user or key is wrong, after
  // GuardedListener::kPatience if they send nothing.
  UnixSocket accept(const JobKey& key, Deadline deadline);

 private:
  bool undecided(Unproved& unproved, const JobKey& key);

  std::string name_;
  GuardedListener<Unproved> guarded_;
  std::deque<Fd> known_;  // accepted, in the order in which their keys came
};

}  // namespace farandole
