// SPDX-License-Identifier: Apache-2.0
// Messages and file descriptors between the ranks of one host, over Unix sockets in this user's folder. Accepts only
// processes of this user that know the job's key.
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

// Takes constant time, so timing reveals nothing of the expected key.
bool equal_keys(std::span<const std::byte> shown, std::span<const std::byte> expected);

struct UnixMessage {
  std::vector<std::byte> bytes;
  std::vector<Fd> fds;
};

// One connection. Every call throws kStall at its deadline, and kPeer when the peer has closed.
class UnixSocket {
 public:
  static constexpr size_t kMaxBytes = 64 * 1024;  // per message
  static constexpr size_t kMaxFds = 64;

  // Sends the key at once without waiting for accept(). A refusal shows in the next receive().
  static UnixSocket connect(const std::string& name, const JobKey& key, Deadline deadline);
  explicit UnixSocket(Fd fd) : fd_(std::move(fd)) {}

  // Sends one whole message; `bytes` must not be empty. The sender keeps the descriptors.
  void send(std::span<const std::byte> bytes, std::span<const int> fds, Deadline deadline);
  UnixMessage receive(Deadline deadline);

  int fd() const { return fd_.get(); }  // for poll(): POLLHUP when the peer has closed

 private:
  Fd fd_;
};

// Name of a listening socket. Its owner removes it; the copy in a forked child does not.
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
  // Has no name if there is no place for a socket; trouble() then says why. A rank that is alone needs none.
  UnixListener();

  const std::string& name() const { return name_.path(); }  // random; peers need it to connect
  const std::string& folder() const { return folder_; }     // SocketFolder::identity
  const std::string& trouble() const { return trouble_; }

  // Returns the next peer that has sent the right key; closes other connections.
  UnixSocket accept(const JobKey& key, Deadline deadline);

 private:
  void listen();

  std::string folder_, trouble_;
  Fd fd_;
  SocketName name_;
};

}  // namespace farandole
