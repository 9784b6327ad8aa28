// SPDX-License-Identifier: Apache-2.0
// The wire over TCP. A connection carries one channel's bytes from one member to another, and is read only into posted
// receives. So the kernel throttles a fast sender, and messages need no headers or buffers.
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

// Shared by all wires of a rank.
struct TcpEnds {
  Rank rank = 0;  // this rank
  Key128 key{};   // the job's key
  TcpListener listener;
  std::vector<TcpAddress> addresses;    // by rank
  std::vector<std::string> host_names;  // by rank, for error texts
  std::chrono::milliseconds timeout;    // limit for a peer that refuses connections
  Poller* poller = nullptr;             // null: the backend polls
};

class TcpWire final : public Wire {
 public:
  // `ranks`: of the set's members. `number`: never used for another wire of the job, even after closing.
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
  // Connections per channel and direction between two members. Messages alternate between them.
  static constexpr uint64_t kStreams = 2;

  struct Transfer {  // the rest of a message
    std::byte* data;
    size_t bytes;
  };
  struct Connection {  // opened by the sender with its first message
    Rank peer = -1;
    TcpLine name = 0;
    bool sends = false;
    std::unique_ptr<TcpCaller> caller = nullptr;
    Fd fd = {};
    bool watched = false;  // by the poller
    std::deque<Transfer> transfers = {};
    uint64_t posted = 0, complete = 0;  // messages
  };
  size_t callers() const {
    return ranks_.size() * kChannels * kStreams;
  }  // connections from others
  Ticket post(bool sends, int member, Channel channel, std::byte* data, size_t bytes);
  bool open(Connection& connection);
  void move(Connection& connection);
  void fail(const Connection& connection, const std::string& why);

  const std::shared_ptr<TcpEnds> ends_;
  const std::vector<Rank> ranks_;  // by member
  const uint64_t number_;
  std::vector<Connection> connections_;  // by direction, member, channel and stream
  std::vector<uint64_t> posted_;         // messages, by direction, member and channel
  std::byte nothing_{};                  // sent for an empty message
  WireFault fault_;
};

}  // namespace farandole
