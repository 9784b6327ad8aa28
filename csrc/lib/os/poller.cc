// SPDX-License-Identifier: Apache-2.0
#include "lib/os/poller.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/error.h"

namespace farandole {
namespace {

constexpr int kEvents = 32;

bool add(int epoll, int fd, void* tag) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.ptr = tag;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

Fd checked(int fd, const char* call) {
  if (fd < 0) throw_system_error(call, errno, "raise the limit of open files (ulimit -n)");
  return Fd(fd);
}

}  // namespace

Poller::Poller()
    : sockets_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      edges_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")) {
  for (Fd& bell : bells_) bell = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  if (!add(edges_.get(), sockets_.get(), nullptr)) throw_system_error("epoll_ctl", errno);
}

bool Poller::watch(int fd, bool* changed) { return add(sockets_.get(), fd, changed); }

void Poller::mute(bool on) {
  epoll_event event{};
  if (!on) event.events = EPOLLIN | EPOLLET;
  epoll_ctl(edges_.get(), EPOLL_CTL_MOD, sockets_.get(), &event);
}

void Poller::collect() {
  epoll_event events[kEvents];
  int n = kEvents;
  while (n == kEvents) {
    n = epoll_wait(sockets_.get(), events, kEvents, 0);
    for (int i = 0; i < n; ++i) {
      auto* const changed = static_cast<bool*>(events[i].data.ptr);
      *(changed ? changed : &news_) = true;
    }
  }
}

bool Poller::ready() const {
  pollfd sockets{sockets_.get(), POLLIN, 0};
  return poll(&sockets, 1, 0) > 0;
}

FutexResult Poller::sleep(Bell bell, Deadline deadline) {
  const int sockets = bell == kDriver ? sockets_.get() : edges_.get();
  pollfd events[] = {{bells_[bell].get(), POLLIN, 0}, {sockets, POLLIN, 0}};
  const timespec left = Deadline::at(std::max<int64_t>(deadline.ns() - now_ns(), 0)).as_timespec();
  const int n = ppoll(events, 2, deadline.is_never() ? nullptr : &left, nullptr);
  if (n < 0 && errno == EINTR) return FutexResult::kInterrupted;
  if (n < 0) throw_system_error("cannot sleep on sockets", errno);
  if (events[0].revents != 0) {
    uint64_t rings = 0;
    [[maybe_unused]] ssize_t got = ::read(events[0].fd, &rings, sizeof rings);
  }
  if (bell == kOther && events[1].revents != 0) {
    epoll_event edge;
    epoll_wait(sockets, &edge, 1, 0);
  }
  return n == 0 ? FutexResult::kTimedOut : FutexResult::kWoken;
}

void ring_bell(int fd) {
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(fd, &one, sizeof one);
}

}  // namespace farandole
