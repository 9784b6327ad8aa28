// SPDX-License-Identifier: Apache-2.0
#include "control/channel/host_channel.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "lib/ipc/unix_socket.h"
#include "lib/os/thread.h"

namespace farandole {
namespace {

constexpr uint64_t kMostBytes = uint64_t{256} << 20;  // per message

// A frame holds this header, its MAC, the message, and the MAC of all three. The header has its own MAC, so the
// reader trusts the length before it waits for that many bytes.
struct FrameHeader {
  uint64_t bytes;   // message length
  uint64_t number;  // counts the frames of its direction, from 0
};
constexpr size_t kMacBytes = sizeof(Mac128);
constexpr size_t kBeforeMessage = sizeof(FrameHeader) + kMacBytes;

[[noreturn]] void throw_altered(const char* what) {
  throw Error(ErrorCode::kPeer, std::string(what) +
                                    ": somebody on the network between the hosts has changed, "
                                    "repeated or left out what that rank sent");
}

// Makes the kernel give up a silent peer, both while data is unacknowledged and, by probes, while idle.
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
  const auto seal = [&](size_t bytes) {  // appends the MAC of the first `bytes`
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
      throw_altered("a control message with a wrong MAC");
    }
  };
  if (arrived.size() < kBeforeMessage) return std::nullopt;
  check(sizeof(FrameHeader));
  const FrameHeader header = Decoder(arrived).get<FrameHeader>();
  if (header.bytes > kMostBytes || header.number != number_) {
    throw_altered("a control message out of turn");
  }
  const size_t sealed = kBeforeMessage + header.bytes;
  if (arrived.size() < sealed + kMacBytes) return std::nullopt;
  check(sealed);
  ++number_;
  return Frame{arrived.subspan(kBeforeMessage, header.bytes), sealed + kMacBytes};
}

TcpHostChannel::TcpHostChannel(std::vector<TcpPeer> peers, std::chrono::milliseconds timeout,
                               std::function<void()> notify)
    : timeout_(timeout),
      chunk_(64 << 10),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      notify_(std::move(notify)) {
  if (!epoll_ || !wake_) throw_system_error("epoll_create1", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  for (TcpPeer& peer : peers) {
    Link& link = links_[peer.rank];
    link.rank = peer.rank;
    link.fd = std::move(peer.fd);
    link.writer = FrameWriter(peer.session.sends);
    link.reader = FrameReader(peer.session.receives);
    limit_silence(link.fd.get(), timeout);
    watch(link, EPOLL_CTL_ADD);
  }
  thread_ = start_thread("farandole-tcp", [this] { run(); });
}

TcpHostChannel::~TcpHostChannel() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void TcpHostChannel::finish(Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    finishing_ = true;
    finish_by_ = deadline;
  }
  wake();
  thread_.join();
}

bool TcpHostChannel::over() {
  return stop_ || (finishing_ && (say_last() || finish_by_.expired()));
}

bool TcpHostChannel::drain(const OnMessage& hear, const OnEnd& lose) {
  if (!has_message_) return false;
  std::deque<Arrival> arrivals;
  {
    std::lock_guard lock(inbox_mutex_);
    arrivals.swap(inbox_);
    has_message_ = false;
  }
  for (const auto& [from, message, end] : arrivals) {
    if (end) {
      lose(from, *end);
    } else {
      hear(from, message);
    }
  }
  return true;
}

void TcpHostChannel::deliver(Arrival arrival) {
  {
    std::lock_guard lock(inbox_mutex_);
    inbox_.push_back(std::move(arrival));
    has_message_ = true;
  }
  notify_();
}

void TcpHostChannel::wake() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

void TcpHostChannel::watch(Link& link, int operation) {
  epoll_event event{};
  event.events = (link.open ? EPOLLIN : 0U) | (link.out.empty() || link.broken ? 0U : EPOLLOUT);
  event.data.ptr = &link;
  if (operation == EPOLL_CTL_MOD && event.events == link.events) return;
  link.events = event.events;
  const int failed = epoll_ctl(epoll_.get(), operation, link.fd.get(), &event);
  // A peer that has finished was removed from epoll, but may still get messages.
  if (failed && errno == ENOENT && operation == EPOLL_CTL_MOD) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link.fd.get(), &event);
  }
}

void TcpHostChannel::send(Rank peer, ByteView message) {
  std::lock_guard lock(mutex_);
  auto found = links_.find(peer);
  if (found == links_.end() || found->second.broken || found->second.ended) return;
  Link& link = found->second;
  link.out.push_back(link.writer.frame(message));
  if (link.out.size() > 1) return;  // the thread is already sending
  write(link);
  if (!link.out.empty()) watch(link, EPOLL_CTL_MOD);
}

// Sends what it can without blocking. Under the mutex.
void TcpHostChannel::write(Link& link) {
  while (!link.out.empty() && !link.broken) {
    ByteString& first = link.out.front();
    ssize_t n = ::send(link.fd.get(), first.data() + link.out_done, first.size() - link.out_done,
                       MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) {
      link.broken = true;  // reading will notice the end, too
      link.out.clear();
      return;
    }
    link.out_done += static_cast<size_t>(n);
    if (link.out_done < first.size()) continue;
    link.out.pop_front();
    link.out_done = 0;
  }
}

void TcpHostChannel::run() {
  constexpr int kEvents = 32;
  epoll_event events[kEvents];
  for (;;) {
    int timeout = -1;
    {
      std::lock_guard lock(mutex_);
      if (over()) return;
      if (finishing_) timeout = finish_by_.poll_ms();
    }
    int n = epoll_wait(epoll_.get(), events, kEvents, timeout);
    for (int i = 0; i < n; ++i) {
      if (!events[i].data.ptr) {
        uint64_t count = 0;
        [[maybe_unused]] ssize_t got = ::read(wake_.get(), &count, sizeof count);
        continue;
      }
      Link& link = *static_cast<Link*>(events[i].data.ptr);
      if ((events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && link.open) read(link);
      std::lock_guard lock(mutex_);
      write(link);
      watch(link, link.open || !link.out.empty() ? EPOLL_CTL_MOD : EPOLL_CTL_DEL);
    }
  }
}

void TcpHostChannel::read(Link& link) {
  for (;;) {
    ssize_t n = recv(link.fd.get(), chunk_.data(), chunk_.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return close(link, end_by(n < 0 ? errno : 0));
    link.arrived.insert(link.arrived.end(), chunk_.begin(), chunk_.begin() + n);
    take_messages(link);
    if (!link.open || std::cmp_less(n, chunk_.size())) return;
  }
}

void TcpHostChannel::take_messages(Link& link) {
  size_t at = 0;
  try {
    while (const auto frame = link.reader.next(ByteView(link.arrived).subspan(at))) {
      deliver({link.rank, ByteString(frame->message.begin(), frame->message.end())});
      at += frame->bytes;
    }
  } catch (const Error& altered) {
    return close(link, std::string("is lost: ") + altered.what());  // no later byte counts
  }
  link.arrived.erase(link.arrived.begin(), link.arrived.begin() + static_cast<ptrdiff_t>(at));
}

// ECONNRESET and EPIPE count as the peer's own end: they come when a process with unread messages is killed.
std::string TcpHostChannel::end_by(int error_number) const {
  if (error_number == 0 || error_number == ECONNRESET || error_number == EPIPE) {
    return "has ended: that rank died; see its own output for the reason (killed, out of memory, "
           "crashed?)";
  }
  std::string text = std::string("is lost: ") + std::strerror(error_number);
  if (error_number == ETIMEDOUT) {
    text += " after " + std::to_string(timeout_.count() / 1000) + " s, FARANDOLE_PEER_TIMEOUT";
  }
  return text + ": that host or the network between the hosts is down";
}

void TcpHostChannel::close(Link& link, std::string how) {
  link.open = false;
  deliver({link.rank, {}, std::move(how)});
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
