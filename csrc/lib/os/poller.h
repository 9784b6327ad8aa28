// SPDX-License-Identifier: Apache-2.0
// What a rank's threads sleep on if other hosts can send to it: sockets, and wake-ups by the ranks of its host, at once.
#pragma once

#include <array>
#include <atomic>

#include "base/clock.h"
#include "lib/os/fd.h"
#include "lib/os/futex.h"

namespace farandole {

// Two threads may sleep here: the one that drives, and one that does not and is woken in order to drive. Both have a
// bell, an eventfd that wakes it. epoll reports a change of a socket once (EPOLLET), so the driver must use each socket
// until EAGAIN before it sleeps.
class Poller {
 public:
  enum Bell { kDriver, kOther };
  static constexpr int kBells = 2;

  // Throws Error(kLibrary) if the process has no descriptor left.
  Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Watches a socket until it is closed. `changed` becomes true in collect() when the socket has new bytes or new room,
  // or has ended; it must outlive the socket. Without it, has_news() becomes true. The driver, or before it starts.
  // False: the kernel has no room; errno says why.
  [[nodiscard]] bool watch(int fd, bool* changed = nullptr);
  // Reads the changes since the last call. The driver only, like has_news() and take_news().
  void collect();
  bool has_news() const { return news_; }
  void take_news() { news_ = false; }

  // While it is muted, changes of sockets wake only the driver; afterwards also those that came meanwhile. Without this
  // two threads would wake for each message. The driver only.
  void mute(bool on);
  // Any thread: true if collect() would find a change.
  bool ready() const;
  int bell(Bell bell) const { return bells_[bell].get(); }
  // Sleeps until the bell rings or a socket changes. Never returns kChanged.
  FutexResult sleep(Bell bell, Deadline deadline);

 private:
  Fd sockets_;
  Fd edges_;  // holds only `sockets_`: it reports a change once, also while nobody collects it
  std::array<Fd, kBells> bells_;
  bool news_ = false;
};

// Rings a bell of this or a different process.
void ring_bell(int fd);

}  // namespace farandole
