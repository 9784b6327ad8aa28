// SPDX-License-Identifier: Apache-2.0
#include "control/channel/tcp_channel.h"

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

namespace farandole {

namespace {

// The kernel gives the connection up: while something is sent, and by probes while nothing is.
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

TcpChannel::TcpChannel(std::vector<TcpPeer> peers, std::chrono::milliseconds timeout,
                       std::function<void()> notify)
    : HostChannel(std::move(notify)),
      timeout_(timeout),
      chunk_(64 << 10),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !wake_) throw_system_error("epoll_create1", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  for (TcpPeer& peer : peers) {
    Link& link = links_[peer.rank];
    link.rank = peer.rank;
    link.fd = std::move(peer.fd);
    limit_silence(link.fd.get(), timeout);
    watch(link, EPOLL_CTL_ADD);
  }
  start("farandole-tcp");
}

TcpChannel::~TcpChannel() { stop(); }

void TcpChannel::wake() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(wake_.get(), &one, sizeof one);
}

void TcpChannel::watch(Link& link, int operation) {
  epoll_event event{};
  event.events = (link.open ? EPOLLIN : 0U) | (link.out.empty() || link.broken ? 0U : EPOLLOUT);
  event.data.ptr = &link;
  if (operation == EPOLL_CTL_MOD && event.events == link.events) return;
  link.events = event.events;
  const int failed = epoll_ctl(epoll_.get(), operation, link.fd.get(), &event);
  // A link whose peer has said all is not listened to any more, but may have something to say.
  if (failed && errno == ENOENT && operation == EPOLL_CTL_MOD) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link.fd.get(), &event);
  }
}

void TcpChannel::send(Rank peer, ByteView message) {
  std::lock_guard lock(mutex_);
  auto found = links_.find(peer);
  if (found == links_.end() || found->second.broken || found->second.ended) return;
  Link& link = found->second;
  ByteString framed;
  Encoder(framed).put_bytes(message);
  link.out.push_back(std::move(framed));
  if (link.out.size() > 1) return;  // the thread is at it
  write(link);
  if (!link.out.empty()) watch(link, EPOLL_CTL_MOD);
}

// As much as goes now. Under the mutex.
void TcpChannel::write(Link& link) {
  while (!link.out.empty() && !link.broken) {
    ByteString& first = link.out.front();
    ssize_t n = ::send(link.fd.get(), first.data() + link.out_done, first.size() - link.out_done,
                       MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) {
      link.broken = true;  // reading will find its end as well
      link.out.clear();
      return;
    }
    link.out_done += static_cast<size_t>(n);
    if (link.out_done < first.size()) continue;
    link.out.pop_front();
    link.out_done = 0;
  }
}

void TcpChannel::run() {
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

void TcpChannel::read(Link& link) {
  for (;;) {
    ssize_t n = recv(link.fd.get(), chunk_.data(), chunk_.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return close(link, n < 0 ? errno : 0);
    link.arrived.insert(link.arrived.end(), chunk_.begin(), chunk_.begin() + n);
    take_messages(link);
    if (!link.open || std::cmp_less(n, chunk_.size())) return;
  }
}

void TcpChannel::take_messages(Link& link) {
  size_t at = 0;
  uint32_t size = 0;
  while (link.arrived.size() - at >= sizeof size) {
    std::memcpy(&size, link.arrived.data() + at, sizeof size);
    if (size == 0 || size > kMaxMessage) return close(link, EBADMSG);  // no word of it counts
    if (link.arrived.size() - at - sizeof size < size) break;
    auto begin = link.arrived.begin() + static_cast<ptrdiff_t>(at + sizeof size);
    deliver(link.rank, ByteString(begin, begin + size));
    at += sizeof size + size;
  }
  link.arrived.erase(link.arrived.begin(), link.arrived.begin() + static_cast<ptrdiff_t>(at));
}

// A process that is killed with messages unread resets its connections: that is its own end, too.
void TcpChannel::close(Link& link, int error_number) {
  link.open = false;
  const bool its_own = error_number == 0 || error_number == ECONNRESET || error_number == EPIPE;
  std::string trouble = its_own ? "" : std::strerror(error_number);
  if (error_number == ETIMEDOUT) {
    trouble += " after " + std::to_string(timeout_.count() / 1000) + " s, FARANDOLE_PEER_TIMEOUT";
  }
  deliver_end(link.rank, std::move(trouble));
}

bool TcpChannel::say_last() {
  bool quiet = true;
  for (auto& [rank, link] : links_) {
    if (link.out.empty() && !std::exchange(link.ended, true)) shutdown(link.fd.get(), SHUT_WR);
    quiet = quiet && link.ended && !link.open;
  }
  return quiet;
}

}  // namespace farandole
