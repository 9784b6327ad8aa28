// SPDX-License-Identifier: Apache-2.0
// Plain TCP on loopback for tests that play somebody else: a place to call, and calls.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "check.h"
#include "control/protocol/codec.h"
#include "lib/net/tcp_socket.h"

namespace farandole::check {

inline sockaddr_in loopback(uint16_t port) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  return to;
}

inline Fd tcp() {
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patient{60, 0};  // a test that waits for what never comes fails
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &patient, sizeof patient);
  return fd;
}

inline ByteString receive(const Fd& fd, size_t bytes) {
  ByteString got(bytes);
  CHECK_EQ(recv(fd.get(), got.data(), bytes, MSG_WAITALL), bytes);
  return got;
}

inline void give(const Fd& fd, const ByteString& bytes) {
  CHECK_EQ(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), bytes.size());
}

inline bool closed(const Fd& fd) {
  std::byte one;
  return recv(fd.get(), &one, 1, 0) <= 0;
}

// Listens where a rank calls.
class Trap {
 public:
  Trap() : listening_(tcp()) {
    sockaddr_in own = loopback(0);
    CHECK_EQ(bind(listening_.get(), reinterpret_cast<sockaddr*>(&own), sizeof own), 0);
    CHECK_EQ(listen(listening_.get(), 8), 0);
    socklen_t size = sizeof own;
    CHECK_EQ(getsockname(listening_.get(), reinterpret_cast<sockaddr*>(&own), &size), 0);
    port_ = ntohs(own.sin_port);
  }
  TcpAddress address() const { return {{"127.0.0.1"}, port_}; }
  Fd catch_one() const { return Fd(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC)); }

 private:
  Fd listening_;
  uint16_t port_ = 0;
};

inline Fd call(const TcpAddress& address) {
  Fd fd = tcp();
  const sockaddr_in to = loopback(address.port);
  CHECK_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  return fd;
}

}  // namespace farandole::check
