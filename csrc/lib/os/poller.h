// SPDX-License-Identifier: Apache-2.0
// In jobs of several hosts, lets a rank's threads sleep until a socket changes, or a rank of this host wakes them.
#pragma once

#include <array>
#include <atomic>

#include "base/clock.h"
#include "lib/os/fd.h"
#include "lib/os/futex.h"

namespace farandole {

// Two threads may sleep here: the driver, and a thread that is woken to drive. An eventfd, its bell, wakes each. epoll
// reports a change of a socket once (EPOLLET), so the driver must use each socket until EAGAIN before it sleeps.
class Poller {
 public:
  enum Bell { kDriver, kOther };
  static constexpr int kBells = 2;

  // Throws Error(kLibrary) if the process can open no more descriptors.
  Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Watches a socket until it is closed. If the socket has new bytes or new room, or has ended, collect() sets
  // `changed`, which must outlive the socket. Without `changed`, collect() makes has_news() true. Call watch() on the
  // driver, or before the driver starts. Returns false if the kernel refused; see errno.
  [[nodiscard]] bool watch(int fd, bool* changed = nullptr);
  // Reads the changes since the last call. Driver only, like has_news() and take_news().
  void collect();
  bool has_news() const { return news_; }
  void take_news() { news_ = false; }

  // On: a change of a socket wakes only the driver, so that a message does not wake two threads. Off: a change wakes
  // both threads, even if the change came while muted. Driver only.
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

// Rings a bell, perhaps of another process.
void ring_bell(int fd);

}  // namespace farandole
