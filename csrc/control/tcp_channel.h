// SPDX-License-Identifier: Apache-2.0
// Messages between a host's leader and the leaders linked with it: one connection each, and one thread
// that sleeps on all of them. Nothing here blocks but finish().
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "control/codec.h"
#include "core/types.h"
#include "lib/clock.h"
#include "lib/tcp_socket.h"

namespace farandole {

class TcpChannel {
 public:
  // notify: something has come. On the channel's thread. timeout: of a peer that answers nothing, not
  // even the kernel's probes of an idle connection.
  TcpChannel(std::vector<TcpPeer> peers, std::chrono::milliseconds timeout,
             std::function<void()> notify);
  ~TcpChannel();
  TcpChannel(const TcpChannel&) = delete;
  TcpChannel& operator=(const TcpChannel&) = delete;

  // Any thread. What does not go at once waits in private memory. To a peer that is gone: dropped.
  void send(Rank peer, ByteView message);
  // Visits what has come, in order; an empty message is the last: that peer is gone. The driver only.
  using Visitor = std::function<void(Rank, ByteView)>;
  bool drain(const Visitor& visit);
  bool has_message() const { return has_message_; }

  // The end: what waits goes out, then we say no more and listen until all peers have ended, too.
  void finish(Deadline deadline);

  int64_t messages_sent() const { return sent_; }

 private:
  static constexpr uint32_t kMaxMessage = 256U << 20;  // beyond it, the peer is mad
  struct Link {
    Rank rank = 0;
    Fd fd;
    std::atomic<bool> open{true};  // for reading
    ByteString arrived;            // beginning of a message; the thread's own
    std::deque<ByteString> out;    // under the mutex, as all that follows
    size_t out_done = 0;           // bytes of the first one
    bool broken = false;           // for writing
    bool ended = false;            // shut down for writing
  };

  void run();
  void read(Link& link);
  void take_messages(Link& link);
  void close(Link& link);
  void write(Link& link);
  void watch(Link& link, int operation);
  void wake();
  bool all_quiet();
  void deliver(Rank from, ByteString message);

  std::map<Rank, Link> links_;
  std::function<void()> notify_;
  Fd epoll_;
  Fd wake_;
  std::mutex mutex_;
  std::deque<std::pair<Rank, ByteString>> inbox_;
  std::atomic<bool> has_message_{false};
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> sent_{0};
  bool finishing_ = false;
  Deadline finish_by_ = Deadline::never();
  std::thread thread_;
};

}  // namespace farandole
