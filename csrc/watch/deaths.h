// SPDX-License-Identifier: Apache-2.0
// A thread that sleeps until another rank of this host dies. It lives beside Python and the engine, so
// that a death is told within milliseconds whatever they do.
#pragma once

#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "base/types.h"
#include "lib/os/fd.h"
#include "lib/os/process.h"

namespace farandole {

class DeathWatch {
 public:
  struct Peer {
    Rank rank = 0;
    pid_t pid = 0;
    uint64_t start_time = 0;
    bool same_namespace = true;  // else its pid means nothing here
    int socket = -1;             // its end is a death notice too; -1: none
  };
  // Called on the watch thread, once per death.
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
  std::thread thread_;
};

}  // namespace farandole
