// SPDX-License-Identifier: Apache-2.0
#include "watch/deaths.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "base/error.h"
#include "lib/os/thread.h"

namespace farandole {
namespace {

constexpr uint64_t kStop = std::numeric_limits<uint64_t>::max();

void add(int epoll, int fd, uint32_t events, uint64_t tag) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) throw_system_error("epoll_ctl", errno);
}

}  // namespace

DeathWatch::DeathWatch(std::vector<Peer> peers, OnDeath on_death)
    : peers_(std::move(peers)),
      pid_fds_(peers_.size()),
      on_death_(std::move(on_death)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC)) {
  if (epoll_.get() < 0 || stop_.get() < 0) throw_system_error("epoll_create1", errno);
  add(epoll_.get(), stop_.get(), EPOLLIN, kStop);
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (peers_[i].same_namespace) {
      pid_fds_[i] = PidFd::open(peers_[i].pid, peers_[i].start_time);
    }
    if (pid_fds_[i]) {
      add(epoll_.get(), pid_fds_[i]->fd(), EPOLLIN, i);
    } else if (peers_[i].socket >= 0) {
      add(epoll_.get(), peers_[i].socket, EPOLLRDHUP, i);
    }
  }
  thread_ = start_thread("farandole-watch", [this] { run(); });
}

DeathWatch::~DeathWatch() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void DeathWatch::run() {
  for (;;) {
    epoll_event event;
    int n = epoll_wait(epoll_.get(), &event, 1, -1);
    if (n <= 0) continue;  // a debugger interrupted the wait; all signals are blocked
    if (event.data.u64 == kStop) return;
    report(static_cast<size_t>(event.data.u64));
  }
}

void DeathWatch::report(size_t peer) {
  int fd = pid_fds_[peer] ? pid_fds_[peer]->fd() : peers_[peer].socket;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  on_death_(peers_[peer]);
}

}  // namespace farandole
