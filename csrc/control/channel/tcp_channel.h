// SPDX-License-Identifier: Apache-2.0
// Leaders linked by TCP: one connection to each peer, and one thread that sleeps on all of them.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "control/channel/host_channel.h"
#include "lib/net/tcp_socket.h"

namespace farandole {

class TcpChannel final : public HostChannel {
 public:
  // timeout: of a peer that answers nothing, not even the kernel's probes of an idle connection.
  TcpChannel(std::vector<TcpPeer> peers, std::chrono::milliseconds timeout,
             std::function<void()> notify);
  ~TcpChannel() override;

  void send(Rank peer, ByteView message) override;

 private:
  static constexpr uint32_t kMaxMessage = 256U << 20;  // beyond it, the peer is mad
  struct Link {
    Rank rank = 0;
    Fd fd;
    std::atomic<bool> open{true};  // for reading
    ByteString arrived;            // beginning of a message; the thread's own
    std::deque<ByteString> out;    // under the mutex, as all that follows
    size_t out_done = 0;           // bytes of the first one
    uint32_t events = 0;           // that are waited for
    bool broken = false;           // for writing
    bool ended = false;            // shut down for writing
  };

  void run() override;
  void wake() override;
  bool say_last() override;
  void read(Link& link);
  void take_messages(Link& link);
  void close(Link& link, int error_number);
  void write(Link& link);
  void watch(Link& link, int operation);

  std::map<Rank, Link> links_;
  const std::chrono::milliseconds timeout_;
  ByteString chunk_;  // where the thread reads
  Fd epoll_;
  Fd wake_;
};

}  // namespace farandole
