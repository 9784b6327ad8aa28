// SPDX-License-Identifier: Apache-2.0
// A listening socket, and those who have come to it without having proved yet who they are. None of them
// holds up another: each is judged by what it has said so far, and dropped when it is silent for too long.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "lib/os/fd.h"

namespace farandole {

constexpr const char* kMoreFiles = "raise ulimit -n";

template <class Stranger>  // begins with its Fd
class Doorway {
 public:
  static constexpr std::chrono::seconds kPatience{5};

  // most: so many strangers at once; the oldest goes when one more comes.
  Doorway(Fd listening, size_t most) : fd_(std::move(listening)), most_(most) {}
  int fd() const { return fd_.get(); }

  // Takes in all who wait outside.
  void admit() {
    for (;;) {
      Fd peer(accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!peer && (errno == EMFILE || errno == ENFILE)) {
        throw_system_error("cannot accept a connection", errno, kMoreFiles);
      }
      if (!peer && errno != EINTR && errno != ECONNABORTED) return;
      if (!peer) continue;
      if (waiting_.size() >= most_) waiting_.erase(waiting_.begin());
      waiting_.push_back({Stranger{std::move(peer)}, Deadline::in(kPatience)});
    }
  }
  // undecided(stranger): neither proved, and taken, nor found to be wrong.
  template <class Judge>
  void judge(Judge&& undecided) {
    std::erase_if(waiting_,
                  [&](Waiting& one) { return !undecided(one.stranger) || one.due.expired(); });
  }
  // Until somebody comes, says something, or has been silent for too long.
  void wait(Deadline deadline) const {
    std::vector<pollfd> events{{fd_.get(), POLLIN, 0}};
    for (const Waiting& one : waiting_) {
      events.push_back({one.stranger.fd.get(), POLLIN, 0});
      deadline = std::min(deadline, one.due);
    }
    poll(events.data(), events.size(), deadline.poll_ms());
  }

 private:
  struct Waiting {
    Stranger stranger;
    Deadline due;
  };
  Fd fd_;
  size_t most_;
  std::vector<Waiting> waiting_;
};

}  // namespace farandole
