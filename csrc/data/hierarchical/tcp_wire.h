// SPDX-License-Identifier: Apache-2.0
// A wire that uses TCP. A connection carries bytes of one channel from one member to another. A member reads only into
// posted receives, so the kernel throttles a fast sender. Both ends know the length of every message, so there are no
// headers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"
#include "data/hierarchical/wire.h"
#include "lib/net/tcp_socket.h"
#include "lib/os/poller.h"

namespace farandole {

// The listener, addresses and settings that all wires of a rank share.
struct TcpEnds {
  Rank rank = 0;
  Key128 key{};  // the job's key
  TcpListener listener;
  std::vector<TcpAddress> addresses;    // by rank
  std::vector<std::string> host_names;  // indexed by rank, for error texts
  std::chrono::milliseconds timeout;    // a peer that refuses connections for this long is lost
  Poller* poller = nullptr;             // null if the backend polls
};

class TcpWire final : public Wire {
 public:
  // `ranks` are the world ranks of the set's members, indexed by member. `number` must differ from the numbers of all
  // other wires of the job, including closed ones.
  TcpWire(std::shared_ptr<TcpEnds> ends, std::vector<Rank> ranks, uint64_t number);
  ~TcpWire() override;

  size_t most_bytes() const override { return 128 * 1024; }
  Ticket send(int member, Channel channel, const std::byte* data, size_t bytes) override;
  Ticket receive(int member, Channel channel, std::byte* data, size_t bytes) override;
  void move() override;
  bool wakes() const override;
  bool done(Ticket ticket) override;
  bool abandon() override;

 private:
  // Number of connections for each channel and direction between two members. Messages use these connections in turn.
  static constexpr uint64_t kStreams = 2;

  struct Transfer {  // the remaining bytes of a message
    std::byte* data;
    size_t bytes;
  };
  struct Connection {  // the sender opens it for the first message
    Rank peer = -1;
    TcpLine name = 0;
    bool sends = false;
    std::unique_ptr<TcpCaller> caller = nullptr;
    Fd fd = {};
    bool watched = false;  // true if the poller watches the connection
    std::deque<Transfer> transfers = {};
    uint64_t posted = 0, complete = 0;  // numbers of messages
  };
  // Returns the number of connections that peers may open.
  size_t callers() const { return ranks_.size() * kChannels * kStreams; }
  Ticket post(bool sends, int member, Channel channel, std::byte* data, size_t bytes);
  bool open(Connection& connection);
  void move(Connection& connection);
  void fail(const Connection& connection, const std::string& why);

  const std::shared_ptr<TcpEnds> ends_;
  const std::vector<Rank> ranks_;  // by member
  const uint64_t number_;
  std::vector<Connection> connections_;  // by direction, member, channel and stream
  std::vector<uint64_t> posted_;         // messages so far, by direction, member and channel
  std::byte nothing_{};                  // the byte that is sent for an empty message
  WireFault fault_;
};

}  // namespace farandole
