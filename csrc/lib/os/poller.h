// SPDX-License-Identifier: Apache-2.0
// In jobs with several hosts, lets a rank's threads sleep until a socket changes or a rank of this host wakes them.
#pragma once

#include <array>
#include <atomic>

#include "base/clock.h"
#include "lib/os/fd.h"
#include "lib/os/futex.h"

namespace farandole {

// Two threads may sleep here: the driver, and another thread that can be woken to become the driver. Each is woken by
// an eventfd, its bell. epoll reports a change of a socket only once (EPOLLET), so the driver must use each socket
// until EAGAIN before it sleeps.
class Poller {
 public:
  enum Bell { kDriver, kOther };
  static constexpr int kBells = 2;

  // Throws Error(kLibrary) if the process can open no more descriptors.
  Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Watches a socket until it is closed. If the socket has new bytes or new room, or has ended, collect() sets
  // `changed`, which must outlive the socket. If `changed` is null, collect() makes has_news() true instead. Call
  // watch() on the driver, or before the driver starts. Returns false and sets errno if the kernel refused.
  [[nodiscard]] bool watch(int fd, bool* changed = nullptr);
  // Reads the changes since the last call. Only the driver may call this function, has_news() and take_news().
  void collect();
  bool has_news() const { return news_; }
  void take_news() { news_ = false; }

  // If `on` is true, a change of a socket wakes only the driver, so that a message does not wake two threads. If it is
  // false, a change wakes both threads, even if the change happened while `on` was true. Only the driver may call this.
  void mute(bool on);
  // True if collect() would find a change. May be called from any thread.
  bool ready() const;
  int bell(Bell bell) const { return bells_[bell].get(); }
  // Sleeps until the bell rings or a socket changes. Never returns kChanged.
  FutexResult sleep(Bell bell, Deadline deadline);

 private:
  Fd sockets_;
  Fd edges_;  // watches only `sockets_`; reports a change once, even if it is not collected
  std::array<Fd, kBells> bells_;
  bool news_ = false;
};

// Rings a bell, which may belong to another process.
void ring_bell(int fd);

}  // namespace farandole
