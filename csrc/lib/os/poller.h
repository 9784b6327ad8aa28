// SPDX-License-Identifier: Apache-2.0
// Lets a rank's threads sleep until a socket changes or a rank of their host wakes them, in jobs of several hosts.
#pragma once

#include <array>
#include <atomic>

#include "base/clock.h"
#include "lib/os/fd.h"
#include "lib/os/futex.h"

namespace farandole {

// Two threads may sleep here: the driver, and one that is woken to drive. Each has a bell: an eventfd that
// wakes it. epoll reports a change of a socket once (EPOLLET), so the driver must use each socket until EAGAIN before
// sleeping.
class Poller {
 public:
  enum Bell { kDriver, kOther };
  static constexpr int kBells = 2;

  // Throws Error(kLibrary) if the process can open no more descriptors.
  Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Watches a socket until it is closed. collect() sets `changed`, which must outlive the socket, when the socket has
  // new bytes or new room, or has ended; without `changed`, it sets has_news(). Called by the driver, or before
  // it starts. False: the kernel refused; see errno.
  [[nodiscard]] bool watch(int fd, bool* changed = nullptr);
  // Reads the changes since the last call. Driver only, like has_news() and take_news().
  void collect();
  bool has_news() const { return news_; }
  void take_news() { news_ = false; }

  // On: changes of sockets wake only the driver, because two threads would wake for each message otherwise. Off: they
  // wake both, also for changes that came meanwhile. Driver only.
  void mute(bool on);
  // True if collect() would find a change. Any thread.
  bool ready() const;
  int bell(Bell bell) const { return bells_[bell].get(); }
  // Sleeps until the bell rings or a socket changes. Never returns kChanged.
  FutexResult sleep(Bell bell, Deadline deadline);

 private:
  Fd sockets_;
  Fd edges_;  // watches only `sockets_`; reports a change once, even if collect() has not read it
  std::array<Fd, kBells> bells_;
  bool news_ = false;
};

// The bell may be of another process.
void ring_bell(int fd);

}  // namespace farandole
