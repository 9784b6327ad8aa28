// SPDX-License-Identifier: Apache-2.0
#include "lib/ipc/unix_socket.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/own_file.h"
#include "lib/ipc/socket_folder.h"

namespace farandole {
namespace {

constexpr int kUnixBacklog = 4096;
constexpr int kRefsPauseMs = 1;

[[noreturn]] void throw_timed_out(const char* what) {
  throw Error(ErrorCode::kStall, std::string("the deadline passed while ") + what);
}

[[noreturn]] void throw_failed(const char* what, int error_number) {
  if (error_number == EPIPE || error_number == ECONNRESET || error_number == ECONNREFUSED ||
      error_number == ENOENT) {
    throw Error(ErrorCode::kPeer, std::string("the peer has ended: failed while ") + what);
  }
  throw_system_error(std::string("failed while ") + what, error_number);
}

Fd make_socket(int flags = 0) {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!fd) throw_system_error("cannot create a Unix socket", errno);
  return fd;
}

struct SocketAddress {
  explicit SocketAddress(const std::string& path) {
    if (path.empty() || path.size() >= sizeof(storage.sun_path)) {
      throw Error(ErrorCode::kInternal, "invalid path of a Unix socket: " + path);
    }
    storage.sun_family = AF_UNIX;
    path.copy(storage.sun_path, path.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr_un storage{};
};

std::string random_name() {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string name;
  for (const std::byte byte : random_key()) {
    name += kDigits[std::to_integer<int>(byte >> 4)];
    name += kDigits[std::to_integer<int>(byte & std::byte{15})];
  }
  return name;
}

// Limits the duration of connect(). On a blocking socket, connect() waits for a place in the listener's backlog, but no
// longer than the send timeout.
void set_send_timeout(const Fd& fd, Deadline deadline) {
  const int64_t left_us =
      deadline.is_never() ? 0 : std::max<int64_t>(1, (deadline.ns() - now_ns()) / 1000);
  const timeval timeout{left_us / 1'000'000, left_us % 1'000'000};  // zero would mean no timeout
  if (setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0) {
    throw_system_error("cannot set a time-out", errno);
  }
}

void wait_ready(int fd, short events, Deadline deadline, const char* what) {
  for (;;) {
    pollfd event{fd, events, 0};
    const int ready = poll(&event, 1, deadline.poll_ms());
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw_failed(what, errno);
    if (deadline.expired()) throw_timed_out(what);
  }
}

// Retries a non-blocking call until it succeeds or the deadline passes.
template <class Call>
size_t complete(int fd, short events, Deadline deadline, const char* what, Call&& call) {
  for (;;) {
    const ssize_t done = call();
    if (done >= 0) return static_cast<size_t>(done);
    if (errno == EAGAIN) {
      wait_ready(fd, events, deadline, what);
    } else if (errno == ETOOMANYREFS && !deadline.expired()) {
      // More descriptors are in flight to this user's processes than `ulimit -n` allows. They will soon be received.
      poll(nullptr, 0, kRefsPauseMs);
    } else if (errno != EINTR) {
      throw_failed(what, errno);
    }
  }
}

uid_t peer_user(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    throw_system_error("cannot get the user of the peer", errno);
  }
  return peer.uid;
}

using FdSpace = std::array<std::byte, CMSG_SPACE(sizeof(int) * UnixSocket::kMaxFds)>;

// The kernel attaches only descriptors: the socket has not asked for anything else.
std::vector<Fd> take_fds(msghdr& header) {
  std::vector<Fd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part; part = CMSG_NXTHDR(&header, part)) {
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

JobKey random_key() {
  JobKey key;
  size_t filled = 0;
  while (filled < key.size()) {
    const ssize_t got = getrandom(key.data() + filled, key.size() - filled, 0);
    if (got < 0 && errno != EINTR) throw_system_error("the kernel gave no random numbers", errno);
    if (got > 0) filled += static_cast<size_t>(got);
  }
  return key;
}

bool equal_keys(std::span<const std::byte> shown, std::span<const std::byte> expected) {
  if (shown.size() != expected.size()) return false;
  std::byte difference{0};
  for (size_t i = 0; i < shown.size(); ++i) difference |= shown[i] ^ expected[i];
  return difference == std::byte{0};
}

UnixSocket UnixSocket::connect(const std::string& name, const JobKey& key, Deadline deadline) {
  constexpr const char* kWhat = "connecting to a rank of this host";
  UnixSocket connection(make_socket());
  const SocketAddress address(name);
  do {
    set_send_timeout(connection.fd_, deadline);
    if (::connect(connection.fd(), address.get(), sizeof address.storage) == 0) {
      if (!is_own_user(peer_user(connection.fd()))) {
        throw Error(ErrorCode::kPeer, "a process of another user listens on the socket of a rank");
      }
      connection.send(key, {}, deadline);
      return connection;
    }
  } while (errno == EINTR && !deadline.expired());
  if (errno == EINTR || errno == EAGAIN) throw_timed_out(kWhat);
  throw_failed(kWhat, errno);
}

void UnixSocket::send(std::span<const std::byte> bytes, std::span<const int> fds,
                      Deadline deadline) {
  if (bytes.empty() || bytes.size() > kMaxBytes || fds.size() > kMaxFds) {
    throw Error(ErrorCode::kInternal, "a message of " + std::to_string(bytes.size()) +
                                          " bytes and " + std::to_string(fds.size()) +
                                          " descriptors is invalid for a Unix socket");
  }
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) FdSpace space{};
  if (!fds.empty()) {
    header.msg_control = space.data();
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
  }
  complete(fd_.get(), POLLOUT, deadline, "sending to a rank of this host",
           [&] { return sendmsg(fd_.get(), &header, MSG_DONTWAIT | MSG_NOSIGNAL); });
}

UnixMessage UnixSocket::receive(Deadline deadline) {
  constexpr const char* kWhat = "receiving from a rank of this host";
  UnixMessage message;
  message.bytes.resize(kMaxBytes);
  iovec part{message.bytes.data(), message.bytes.size()};
  alignas(cmsghdr) FdSpace space;
  msghdr header{};
  message.bytes.resize(complete(fd_.get(), POLLIN, deadline, kWhat, [&] {
    header = msghdr{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = space.data();
    header.msg_controllen = space.size();
    return recvmsg(fd_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  }));
  message.fds = take_fds(header);
  if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    throw Error(ErrorCode::kLibrary,
                "a message was truncated; perhaps raise the limit of open files (ulimit -n)");
  }
  // An empty message means that the peer has closed the connection, because no real message is empty.
  if (message.bytes.empty()) throw_failed(kWhat, ECONNRESET);
  return message;
}

SocketName::SocketName(std::string path) : path_(std::move(path)), maker_(getpid()) {}

SocketName& SocketName::operator=(SocketName&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(maker_, other.maker_);
  return *this;
}

SocketName::~SocketName() {
  if (!path_.empty() && maker_ == getpid()) unlink(path_.c_str());
}

UnixListener::UnixListener() {
  try {
    listen();
  } catch (const Error& error) {
    trouble_ = error.what();
  }
}

void UnixListener::listen() {
  SocketFolder folder = socket_folder();
  SocketName name(folder.prefix + random_name());
  fd_ = make_socket(SOCK_NONBLOCK);
  const SocketAddress address(name.path());
  if (bind(fd_.get(), address.get(), sizeof address.storage) != 0 ||
      ::listen(fd_.get(), kUnixBacklog) != 0) {
    throw_system_error("cannot listen on a Unix socket", errno);
  }
  folder_ = std::move(folder.identity);
  name_ = std::move(name);
}

UnixSocket UnixListener::accept(const JobKey& key, Deadline deadline) {
  constexpr const char* kWhat = "waiting for a rank of this host to connect";
  for (;;) {
    const auto accepted = [&] { return accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC); };
    UnixSocket peer(Fd(static_cast<int>(complete(fd_.get(), POLLIN, deadline, kWhat, accepted))));
    if (!is_own_user(peer_user(peer.fd()))) continue;
    try {
      if (equal_keys(peer.receive(deadline).bytes, key)) return peer;
    } catch (const Error& error) {
      // kPeer means that this peer has closed its connection, so the next peer is accepted.
      if (error.code() != ErrorCode::kPeer) throw;
    }
  }
}

}  // namespace farandole
