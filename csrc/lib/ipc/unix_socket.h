// SPDX-License-Identifier: Apache-2.0
// Messages and file descriptors between the ranks of one host, over Unix sockets in this user's folder. Only
// processes of the same user that know the job's key are accepted.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
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

// The name of a listening socket. It goes with its owner, but not with the copy in a forked child.
class SocketName {
 public:
  SocketName() = default;
  explicit SocketName(std::string path);
  SocketName(SocketName&& other) noexcept { *this = std::move(other); }
  SocketName& operator=(SocketName&& other) noexcept;
  ~SocketName();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  pid_t maker_ = 0;
};

class UnixListener {
 public:
  // Without a place to listen at it has no name, and trouble() says why: a rank that is alone needs none.
  UnixListener();

  const std::string& name() const { return name_.path(); }  // random; peers need it to connect
  const std::string& folder() const { return folder_; }     // SocketFolder::identity
  const std::string& trouble() const { return trouble_; }

  // The next peer that has sent the right key; others are hung up on.
  UnixSocket accept(const JobKey& key, Deadline deadline);

 private:
  void listen();

  std::string folder_, trouble_;
  Fd fd_;
  SocketName name_;
};

}  // namespace farandole
