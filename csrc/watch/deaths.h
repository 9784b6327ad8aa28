// SPDX-License-Identifier: Apache-2.0
// A thread that waits until other ranks on this host die. It uses neither Python nor the engine.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "base/types.h"
#include "lib/os/fd.h"
#include "lib/os/process.h"
#include "lib/os/thread.h"

namespace farandole {

class DeathWatch {
 public:
  struct Peer {
    Rank rank = 0;
    pid_t pid = 0;
    uint64_t start_time = 0;
    bool same_namespace = true;  // false if `pid` is a number in a different PID namespace
    // A socket that closes when the peer dies, for systems without pidfds; -1 if there is none.
    int socket = -1;
  };
  // The watch thread calls this function once per death.
  using OnDeath = std::function<void(const Peer&)>;

  DeathWatch(std::vector<Peer> peers, OnDeath on_death);
  ~DeathWatch();
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

 private:
  void run();
  void report(size_t peer);

  std::vector<Peer> peers_;
  std::vector<std::optional<PidFd>> pid_fds_;
  OnDeath on_death_;
  Fd epoll_;
  Fd stop_;
  Thread thread_;
};

}  // namespace farandole
