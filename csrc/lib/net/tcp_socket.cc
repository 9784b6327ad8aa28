// SPDX-License-Identifier: Apache-2.0
#include "lib/net/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/types.h"
#include "lib/ipc/unix_socket.h"

namespace farandole {
namespace {

constexpr std::chrono::seconds kConnectPatience{2};  // for one address
constexpr std::chrono::seconds kProofPatience{10};   // the peer may be busy with others
constexpr int kTcpBacklog = 1024;

// hello:  magic, rank of the caller, its nonce          caller -> listener
// answer: the listener's nonce, its proof                listener -> caller
// proof:  the caller's proof                              caller -> listener
constexpr char kMagic[8] = {'f', 'a', 'r', 'a', 'n', 'd', '1', '\n'};
constexpr size_t kHello = 8 + 4 + 16;
constexpr size_t kAnswer = 16 + 16;
constexpr size_t kProof = 16;

void append(std::vector<std::byte>& out, const void* data, size_t size) {
  auto* bytes = static_cast<const std::byte*>(data);
  out.insert(out.end(), bytes, bytes + size);
}

// Both nonces and both ranks are in it, and who speaks: no proof can be used again, or sent back.
Mac128 proof_of(char speaker, int32_t caller, int32_t listener, const std::byte* caller_nonce,
                const std::byte* listener_nonce, const Key128& key) {
  std::vector<std::byte> text;
  append(text, &speaker, 1);
  append(text, &caller, sizeof caller);
  append(text, &listener, sizeof listener);
  append(text, caller_nonce, 16);
  append(text, listener_nonce, 16);
  return siphash128(key, text);
}

void prepare(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

bool poll_one(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd event{fd, events, 0};
    int n = poll(&event, 1, deadline.poll_ms());
    if (n > 0) return true;
    if (n == 0 && deadline.expired()) return false;
    if (n < 0 && errno != EINTR) return false;
  }
}

bool send_all(int fd, const std::vector<std::byte>& bytes, Deadline deadline) {
  for (size_t at = 0; at < bytes.size();) {
    ssize_t n = ::send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
    if (n > 0) {
      at += static_cast<size_t>(n);
    } else if (errno != EINTR && (errno != EAGAIN || !poll_one(fd, POLLOUT, deadline))) {
      return false;
    }
  }
  return true;
}

bool receive_all(int fd, std::span<std::byte> bytes, Deadline deadline) {
  for (size_t at = 0; at < bytes.size();) {
    ssize_t n = ::recv(fd, bytes.data() + at, bytes.size() - at, 0);
    if (n == 0) return false;
    if (n > 0) {
      at += static_cast<size_t>(n);
    } else if (errno != EINTR && (errno != EAGAIN || !poll_one(fd, POLLIN, deadline))) {
      return false;
    }
  }
  return true;
}

// Of interfaces that are up; loopback last, for jobs on one machine.
std::vector<std::string> own_addresses() {
  std::vector<std::string> real, loopback;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {"127.0.0.1"};
  for (ifaddrs* i = first; i; i = i->ifa_next) {
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP)) continue;
    int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    char text[NI_MAXHOST];
    socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(i->ifa_addr, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0)
      continue;
    bool local = (i->ifa_flags & IFF_LOOPBACK) != 0;
    bool link_local = std::strncmp(text, "fe80:", 5) == 0;  // means nothing on another host
    if (!link_local) (local ? loopback : real).push_back(text);
  }
  freeifaddrs(first);
  real.insert(real.end(), loopback.begin(), loopback.end());
  return real;
}

Fd listen_on(int family) {
  Fd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return {};
  sockaddr_storage any{};
  any.ss_family = static_cast<sa_family_t>(family);
  int zero = 0;
  if (family == AF_INET6) setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
  socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  bool bound = bind(fd.get(), reinterpret_cast<sockaddr*>(&any), size) == 0;
  return bound && listen(fd.get(), kTcpBacklog) == 0 ? std::move(fd) : Fd{};
}

uint16_t port_of(int fd) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) return 0;
  return ntohs(own.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(own).sin_port
                                        : reinterpret_cast<sockaddr_in6&>(own).sin6_port);
}

// An invalid Fd: `why` says what went wrong.
Fd connect_to(const std::string& host, uint16_t port, Deadline deadline, std::string& why) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  why = "not an address";
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  Fd fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = errno;
  if (fd) {
    error = connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      error = ETIMEDOUT;
      socklen_t size = sizeof error;
      if (poll_one(fd.get(), POLLOUT, deadline)) {
        getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
    }
  }
  freeaddrinfo(found);
  why = std::strerror(error);
  if (error != 0) return {};
  prepare(fd.get());
  return fd;
}

// The caller's half of the handshake.
bool prove(int fd, int32_t own, int32_t rank, const Key128& key, Deadline deadline) {
  const Key128 nonce = random_key();
  std::vector<std::byte> hello;
  append(hello, kMagic, sizeof kMagic);
  append(hello, &own, sizeof own);
  append(hello, nonce.data(), nonce.size());
  std::array<std::byte, kAnswer> answer;
  if (!send_all(fd, hello, deadline) || !receive_all(fd, answer, deadline)) return false;
  const Mac128 expected = proof_of('L', own, rank, nonce.data(), answer.data(), key);
  if (!equal_macs(std::span(answer).subspan(16), expected)) return false;
  const Mac128 mine = proof_of('C', own, rank, nonce.data(), answer.data(), key);
  return send_all(fd, std::vector<std::byte>(mine.begin(), mine.end()), deadline);
}

}  // namespace

TcpListener::TcpListener() : fd_(listen_on(AF_INET6)) {
  if (!fd_) fd_ = listen_on(AF_INET);
  if (!fd_) return;
  address_ = {own_addresses(), port_of(fd_.get())};
}

std::vector<TcpPeer> TcpListener::accept(int32_t own, const std::vector<int32_t>& ranks,
                                         const Key128& key, Deadline deadline) {
  std::vector<TcpPeer> peers;
  std::vector<int32_t> missing = ranks;
  while (!missing.empty()) {
    admit();
    std::erase_if(strangers_, [&](Stranger& stranger) {
      bool proved = false;
      if (hear(stranger, own, key, proved) && !proved) return stranger.due.expired();
      bool wanted = proved && std::erase(missing, stranger.rank) > 0;
      if (wanted) peers.push_back({stranger.rank, std::move(stranger.fd)});
      return true;
    });
    if (missing.empty()) break;
    if (deadline.expired()) {
      throw Error(ErrorCode::kPeer, "the leaders of other hosts, " + text_of_ranks(missing) +
                                        ", have not connected to rank " + std::to_string(own) +
                                        "; is TCP between the hosts blocked by a firewall?");
    }
    wait(deadline);
  }
  strangers_.clear();
  return peers;
}

void TcpListener::admit() {
  for (;;) {
    Fd peer(accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!peer) return;  // none left, or one that has gone again; no descriptors: later
    prepare(peer.get());
    if (strangers_.size() >= kMaxStrangers) strangers_.erase(strangers_.begin());
    strangers_.push_back({std::move(peer), Deadline::in(kPatience), -1, {}, {}});
  }
}

// Takes what has come, never more than the next message has. False: it is gone, or wrong.
bool TcpListener::hear(Stranger& stranger, int32_t own, const Key128& key, bool& proved) {
  for (;;) {
    const size_t size = stranger.rank < 0 ? kHello : kProof;
    std::vector<std::byte>& got = stranger.received;
    std::byte buffer[kHello];
    ssize_t n = recv(stranger.fd.get(), buffer, size - got.size(), 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (n <= 0) return false;
    append(got, buffer, static_cast<size_t>(n));
    if (got.size() < size) continue;
    if (stranger.rank >= 0) {
      proved = equal_macs(got, stranger.sent);
      return proved;
    }
    if (std::memcmp(got.data(), kMagic, sizeof kMagic) != 0) return false;
    std::memcpy(&stranger.rank, got.data() + 8, 4);
    if (stranger.rank < 0) return false;
    const Key128 nonce = random_key();
    const std::byte* theirs = got.data() + 12;
    const Mac128 mine = proof_of('L', stranger.rank, own, theirs, nonce.data(), key);
    std::vector<std::byte> answer(nonce.begin(), nonce.end());
    append(answer, mine.data(), mine.size());
    ssize_t sent = ::send(stranger.fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    if (sent != static_cast<ssize_t>(answer.size())) return false;  // an empty buffer has room
    const Mac128 wanted = proof_of('C', stranger.rank, own, theirs, nonce.data(), key);
    stranger.sent.assign(wanted.begin(), wanted.end());
    got.clear();
  }
}

void TcpListener::wait(Deadline deadline) const {
  std::vector<pollfd> events{{fd_.get(), POLLIN, 0}};
  for (const Stranger& stranger : strangers_) {
    events.push_back({stranger.fd.get(), POLLIN, 0});
    deadline = std::min(deadline, stranger.due);
  }
  poll(events.data(), events.size(), deadline.poll_ms());
}

TcpPeer tcp_connect(int32_t own, int32_t rank, const TcpAddress& address, const Key128& key,
                    Deadline deadline) {
  std::string tried;
  do {
    tried.clear();
    for (const std::string& host : address.hosts) {
      std::string why;
      Fd fd =
          connect_to(host, address.port, std::min(deadline, Deadline::in(kConnectPatience)), why);
      if (fd) {
        why = "did not prove to be that rank";
        if (prove(fd.get(), own, rank, key, std::min(deadline, Deadline::in(kProofPatience)))) {
          return {rank, std::move(fd)};
        }
      }
      tried += (tried.empty() ? "" : ", ") + host + ": " + why;
      if (deadline.expired()) break;
    }
    poll(nullptr, 0, Deadline::in(std::chrono::milliseconds(50)).poll_ms());  // then once more
  } while (!deadline.expired());
  throw Error(ErrorCode::kPeer, "rank " + std::to_string(own) + " can't reach rank " +
                                    std::to_string(rank) + ", the leader of another host (port " +
                                    std::to_string(address.port) + "; " + tried +
                                    "); is TCP between the hosts blocked by a firewall?");
}

}  // namespace farandole
