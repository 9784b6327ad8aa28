// SPDX-License-Identifier: Apache-2.0
#include "control/channel/host_channel.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "lib/ipc/unix_socket.h"

namespace farandole {
namespace {

constexpr uint64_t kMostBytes = uint64_t{256} << 20;  // per message

// A frame consists of this header, the header's MAC, the message, and the MAC of these three. The reader checks the
// first MAC before it trusts the length in the header and waits for that many bytes.
struct FrameHeader {
  uint64_t bytes;   // length of the message
  uint64_t number;  // counts the frames of each direction, from 0
};
constexpr size_t kMacBytes = sizeof(Mac128);
constexpr size_t kBeforeMessage = sizeof(FrameHeader) + kMacBytes;

[[noreturn]] void throw_altered(const char* what) {
  throw Error(ErrorCode::kPeer, std::string(what) +
                                    ": something between the hosts changed, repeated or dropped "
                                    "messages of that rank");
}

// Makes the kernel end a connection if the peer stops acknowledging data or, when it is idle, keepalive probes.
void limit_silence(int fd, std::chrono::milliseconds timeout) {
  const auto set = [&](int option, int value) {
    setsockopt(fd, IPPROTO_TCP, option, &value, sizeof value);
  };
  constexpr int kProbes = 3;
  const int seconds = std::max<int>(1, static_cast<int>(timeout.count() / 1000 / (kProbes + 1)));
  set(TCP_USER_TIMEOUT, static_cast<int>(timeout.count()));
  set(TCP_KEEPIDLE, seconds);
  set(TCP_KEEPINTVL, seconds);
  set(TCP_KEEPCNT, kProbes);
}

}  // namespace

ByteString FrameWriter::frame(ByteView message) {
  const FrameHeader header{message.size(), number_++};
  ByteString framed(kBeforeMessage + message.size() + kMacBytes);
  const auto seal = [&](size_t bytes) {  // appends the MAC of the first `bytes` bytes
    const Mac128 mac = siphash128(key_, ByteView(framed).first(bytes));
    std::memcpy(framed.data() + bytes, mac.data(), kMacBytes);
  };
  std::memcpy(framed.data(), &header, sizeof header);
  seal(sizeof header);
  std::memcpy(framed.data() + kBeforeMessage, message.data(), message.size());
  seal(kBeforeMessage + message.size());
  return framed;
}

std::optional<FrameReader::Frame> FrameReader::next(ByteView arrived) {
  const auto check = [&](size_t bytes) {
    if (!equal_keys(arrived.subspan(bytes, kMacBytes), siphash128(key_, arrived.first(bytes)))) {
      throw_altered("a control message has a wrong MAC");
    }
  };
  if (arrived.size() < kBeforeMessage) return std::nullopt;
  check(sizeof(FrameHeader));
  const FrameHeader header = Decoder(arrived).get<FrameHeader>();
  if (header.bytes > kMostBytes || header.number != number_) {
    throw_altered("a control message is out of order");
  }
  const size_t sealed = kBeforeMessage + header.bytes;
  if (arrived.size() < sealed + kMacBytes) return std::nullopt;
  check(sealed);
  ++number_;
  return Frame{arrived.subspan(kBeforeMessage, header.bytes), sealed + kMacBytes};
}

TcpHostChannel::TcpHostChannel(std::vector<TcpPeer> peers, std::chrono::milliseconds timeout,
                               Poller& poller)
    : timeout_(timeout), poller_(poller), chunk_(64 << 10) {
  for (TcpPeer& peer : peers) {
    Link& link = links_[peer.rank];
    link.rank = peer.rank;
    link.fd = std::move(peer.fd);
    link.writer = FrameWriter(peer.session.sends);
    link.reader = FrameReader(peer.session.receives);
    limit_silence(link.fd.get(), timeout);
    if (!poller_.watch(link.fd.get(), &link.changed)) throw_system_error("epoll_ctl", errno);
  }
}

// Drops all messages that arrive, because this rank has ended.
void TcpHostChannel::finish(Deadline deadline) {
  while (!say_last() && !deadline.expired()) {
    wait(deadline);
    for (auto& [rank, link] : links_) {
      write(link);
      read(link, [](Rank, ByteView) {}, [](Rank, const std::string&) {});
    }
  }
}

void TcpHostChannel::wait(Deadline deadline) const {
  std::vector<pollfd> sockets;
  for (const auto& [rank, link] : links_) {
    const bool writes = !link.out.empty() && !link.broken;
    const int events = (link.open ? POLLIN : 0) | (writes ? POLLOUT : 0);
    if (events != 0) sockets.push_back({link.fd.get(), static_cast<short>(events), 0});
  }
  poll(sockets.data(), sockets.size(), deadline.poll_ms());
}

bool TcpHostChannel::drain(const OnMessage& hear, const OnEnd& lose) {
  bool any = false;
  for (auto& [rank, link] : links_) {
    if (!std::exchange(link.changed, false)) continue;
    any = true;
    read(link, hear, lose);  // first, because read() reports why a connection ended
    write(link);
  }
  return any;
}

void TcpHostChannel::send(Rank peer, ByteView message) {
  auto found = links_.find(peer);
  if (found == links_.end() || found->second.broken || found->second.ended) return;
  Link& link = found->second;
  link.out.push_back(link.writer.frame(message));
  if (link.out.size() == 1) write(link);  // otherwise drain() sends it later
}

// Sends as much as possible without blocking.
void TcpHostChannel::write(Link& link) {
  while (!link.out.empty() && !link.broken) {
    ByteString& first = link.out.front();
    ssize_t n = ::send(link.fd.get(), first.data() + link.out_done, first.size() - link.out_done,
                       MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) {
      link.broken = true;  // read() will report the end of the connection
      link.out.clear();
      return;
    }
    link.out_done += static_cast<size_t>(n);
    if (link.out_done < first.size()) continue;
    link.out.pop_front();
    link.out_done = 0;
  }
}

// Reads until EAGAIN, because the poller is edge-triggered.
void TcpHostChannel::read(Link& link, const OnMessage& hear, const OnEnd& lose) {
  while (link.open) {
    const ssize_t n = recv(link.fd.get(), chunk_.data(), chunk_.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      link.open = false;
      return lose(link.rank, end_by(n < 0 ? errno : 0));
    }
    link.arrived.insert(link.arrived.end(), chunk_.begin(), chunk_.begin() + n);
    take_messages(link, hear, lose);
  }
}

void TcpHostChannel::take_messages(Link& link, const OnMessage& hear, const OnEnd& lose) {
  size_t at = 0;
  std::string altered;
  const auto next = [&]() -> std::optional<FrameReader::Frame> {
    try {
      return link.reader.next(ByteView(link.arrived).subspan(at));
    } catch (const Error& error) {
      altered = error.what();
      return std::nullopt;
    }
  };
  // Removes the handled messages even if hear() throws, so that the next call continues with the remaining messages.
  struct Rest {
    Link& link;
    size_t& at;
    bool complete = false;
    ~Rest() {
      link.arrived.erase(link.arrived.begin(), link.arrived.begin() + static_cast<ptrdiff_t>(at));
      link.changed |= !complete;
    }
  } rest{link, at};
  while (const auto frame = next()) {
    const ByteView message = frame->message;
    at += frame->bytes;
    hear(link.rank, message);
  }
  rest.complete = true;
  if (altered.empty()) return;
  link.open = false;  // ignores all bytes after the altered frame
  lose(link.rank, "is lost: " + altered);
}

// Treats ECONNRESET and EPIPE as the peer's end. They occur when a process is killed before it has read all messages.
std::string TcpHostChannel::end_by(int error_number) const {
  if (error_number == 0 || error_number == ECONNRESET || error_number == EPIPE) {
    return "has ended: that rank died; see its own output for the reason (killed, out of memory, "
           "crashed?)";
  }
  std::string text = std::string("is lost: ") + std::strerror(error_number);
  if (error_number == ETIMEDOUT) {
    text += " after " + std::to_string(timeout_.count() / 1000) + " s (FARANDOLE_PEER_TIMEOUT)";
  }
  return text + ": that host or the network between the hosts is down";
}

bool TcpHostChannel::say_last() {
  bool quiet = true;
  for (auto& [rank, link] : links_) {
    if (link.out.empty() && !std::exchange(link.ended, true)) shutdown(link.fd.get(), SHUT_WR);
    quiet = quiet && link.ended && !link.open;
  }
  return quiet;
}

}  // namespace farandole
