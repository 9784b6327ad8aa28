// SPDX-License-Identifier: Apache-2.0
// A listening socket and its unauthenticated connections. The listener judges each connection by the bytes that it has
// received so far, without blocking, and drops any connection that sends no proof within 5 s. If all places or all
// descriptors are taken, the listener judges all connections again. It then drops the oldest connection that has not
// sent a hello or, if all have sent a hello, the oldest of all. An honest caller whose connection is dropped tries
// again.
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

constexpr const char* kMoreFiles = "raise the limit of open files (ulimit -n)";

template <class Connection>  // first member: an Fd `fd`; greeted(): true once it has sent a hello
class GuardedListener {
 public:
  static constexpr std::chrono::seconds kPatience{5};

  // `most` is the maximum number of unauthenticated connections that are kept at once.
  GuardedListener(Fd listening, size_t most) : fd_(std::move(listening)), most_(most) {}
  int fd() const { return fd_.get(); }
  // Adds room for this many honest callers. forget() removes this room again.
  void expect(size_t callers) { most_ += callers; }
  void forget(size_t callers) { most_ -= callers; }

  // Accepts a limited number of pending connections, so that a flood of strangers cannot hold the calling thread. Then
  // calls undecided(connection) for each connection. If undecided() returns false, drops the connection, which was
  // either invalid or proved and moved elsewhere. Throws Error(kLibrary) if the process has no descriptor left and
  // there is no unauthenticated connection to drop.
  template <class Judge>
  void admit(Judge&& undecided) {
    const auto judge = [&] {
      std::erase_if(waiting_,
                    [&](Pending& one) { return !undecided(one.connection) || one.due.expired(); });
    };
    const auto make_room = [&](size_t most) {
      if (waiting_.size() > most) judge();
      while (waiting_.size() > most) waiting_.erase(superfluous());
    };
    resumes_ = Deadline::at(0);
    for (size_t calls = 0; calls <= most_ && !is_full(); ++calls) {
      Fd peer(accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (peer) {
        waiting_.push_back({Connection{std::move(peer)}, Deadline::in(kPatience)});
        make_room(most_);
      } else if (errno == EMFILE || errno == ENFILE) {
        const int reason = errno;
        if (waiting_.empty()) throw_system_error("cannot accept a connection", reason, kMoreFiles);
        if (is_young(*superfluous())) break;
        make_room(waiting_.size() - 1);
      } else if (errno != EINTR && errno != ECONNABORTED) {
        break;
      }
    }
    judge();
  }
  // Waits until a caller connects, a connection sends something, or a connection times out.
  void wait(Deadline deadline) const {
    const bool accepts = resumes_.expired();
    std::vector<pollfd> events{{accepts ? fd_.get() : -1, POLLIN, 0}};
    if (!accepts) deadline = std::min(deadline, resumes_);
    for (const Pending& one : waiting_) {
      events.push_back({one.connection.fd.get(), POLLIN, 0});
      deadline = std::min(deadline, one.due);
    }
    poll(events.data(), events.size(), deadline.poll_ms());
  }

 private:
  struct Pending {
    Connection connection;
    Deadline due;
  };
  // Each connection is kept for at least this long, so that a flood of strangers does not push out an honest caller.
  static constexpr std::chrono::milliseconds kLeast{100};
  bool is_young(const Pending& one) {
    const Deadline due =
        Deadline::at(one.due.ns() - std::chrono::nanoseconds(kPatience - kLeast).count());
    if (due.expired()) return false;
    resumes_ = due;
    return true;
  }
  bool is_full() { return waiting_.size() >= most_ && is_young(*superfluous()); }
  // Returns the connection to drop for a new one: the oldest without a hello, because honest callers soon send theirs.
  auto superfluous() {
    const auto greeted = [](const Pending& one) { return one.connection.greeted(); };
    const auto silent = std::ranges::find_if_not(waiting_, greeted);
    return silent == waiting_.end() ? waiting_.begin() : silent;
  }

  Fd fd_;
  size_t most_;
  std::vector<Pending> waiting_;
  Deadline resumes_ = Deadline::at(0);  // when the listener accepts connections again
};

}  // namespace farandole
