// SPDX-License-Identifier: Apache-2.0
// Messages and file descriptors between the ranks of one host, by Unix sockets that have no file. Only
// processes of the same user that know the job's key get in.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "lib/ipc/doorway.h"
#include "lib/os/fd.h"

namespace farandole {

using JobKey = std::array<std::byte, 16>;

// From the kernel's random generator: for the job's key and for names.
JobKey random_key();

struct UnixMessage {
  std::vector<std::byte> bytes;
  std::vector<Fd> fds;
};

// One connection. Every call throws kStall when its deadline passes and kPeer when the peer is gone.
class UnixSocket {
 public:
  static constexpr size_t kMaxBytes = 64 * 1024;  // of one message
  static constexpr size_t kMaxFds = 64;

  // Shows the key at once and does not wait for accept(): a refusal is found by the next receive().
  static UnixSocket connect(const std::string& name, const JobKey& key, Deadline deadline);
  explicit UnixSocket(Fd fd) : fd_(std::move(fd)) {}

  // A message arrives whole; `bytes` is not empty. The descriptors stay the sender's.
  void send(std::span<const std::byte> bytes, std::span<const int> fds, Deadline deadline);
  UnixMessage receive(Deadline deadline);

  pid_t peer_pid() const;  // as the kernel saw it when the peer connected or listened
  uid_t peer_uid() const;
  int fd() const { return fd_.get(); }  // for poll: POLLHUP when the peer is gone

 private:
  Fd fd_;
};

class UnixListener {
  struct Stranger {
    Fd fd;
  };

 public:
  explicit UnixListener(const JobKey& key);

  const std::string& name() const { return name_; }  // random; to be told to the peers

  // The next peer that has shown the key. Others are closed: at once if their user or key is wrong, after
  // `kKeyTimeout` if they are silent.
  UnixSocket accept(Deadline deadline);

  static constexpr std::chrono::seconds kKeyTimeout = Doorway<Stranger>::kPatience;

 private:
  bool undecided(Stranger& stranger);

  JobKey key_;
  std::string name_;
  Doorway<Stranger> doorway_;
  std::deque<Fd> known_;  // in the order of their keys
};

}  // namespace farandole
