// SPDX-License-Identifier: Apache-2.0
// Exchanges messages and file descriptors between the ranks of one host, over Unix sockets in this user's folder.
// Accepts only processes that belong to this user and know the job's key.
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

// Returns random bytes, for names and nonces.
JobKey random_key();

// Compares keys. Takes the same time for every value of `shown`, so that the timing does not reveal the expected key.
bool equal_keys(std::span<const std::byte> shown, std::span<const std::byte> expected);

struct UnixMessage {
  std::vector<std::byte> bytes;
  std::vector<Fd> fds;
};

// One connection. Functions throw Error(kStall) at their deadline, and Error(kPeer) if the peer has closed it.
class UnixSocket {
 public:
  static constexpr size_t kMaxBytes = 64 * 1024;  // per message
  static constexpr size_t kMaxFds = 64;

  // Sends the key without waiting for accept(). If the listener refuses the key, the next receive() throws.
  static UnixSocket connect(const std::string& name, const JobKey& key, Deadline deadline);
  explicit UnixSocket(Fd fd) : fd_(std::move(fd)) {}

  // Sends one message. `bytes` must not be empty. The caller still owns the descriptors.
  void send(std::span<const std::byte> bytes, std::span<const int> fds, Deadline deadline);
  UnixMessage receive(Deadline deadline);

  int fd() const { return fd_.get(); }  // for poll(): POLLHUP when the peer has closed

 private:
  Fd fd_;
};

// The name of a listening socket. The destructor removes the socket's file, except in a forked child.
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
  // If no folder is usable, name() is empty and trouble() tells why. A rank that is alone needs no listener.
  UnixListener();

  const std::string& name() const { return name_.path(); }  // random; peers need it to connect
  const std::string& folder() const { return folder_; }     // SocketFolder::identity
  const std::string& trouble() const { return trouble_; }

  // Returns a connection to the next peer that sends the right key. Closes all other connections.
  UnixSocket accept(const JobKey& key, Deadline deadline);

 private:
  void listen();

  std::string folder_, trouble_;
  Fd fd_;
  SocketName name_;
};

}  // namespace farandole
