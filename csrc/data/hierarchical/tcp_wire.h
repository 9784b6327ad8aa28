// SPDX-License-Identifier: Apache-2.0
// The messages of one process set by TCP. A line carries the bytes of one channel from one member to another,
// nothing else, and is read only into receives that were posted: the kernel holds a fast sender back, and no
// message needs a header or a place to wait.
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
#include "data/hierarchical/wire_fault.h"
#include "lib/net/tcp_socket.h"

namespace farandole {

// What the wires of a rank share.
struct TcpEnds {
  Rank rank = 0;  // own
  Key128 key{};   // the job's
  TcpListener listener;
  std::vector<TcpAddress> addresses;    // by rank
  std::vector<std::string> host_names;  // by rank, for texts
  std::chrono::milliseconds timeout;    // of a peer that refuses to be called
};

class TcpWire final : public Wire {
 public:
  // ranks: of the set's members. number: of the wire; no other of the job, gone ones too, has the same.
  TcpWire(std::shared_ptr<TcpEnds> ends, std::vector<Rank> ranks, uint64_t number);

  size_t most_bytes() const override { return 128 * 1024; }
  Ticket send(int member, Channel channel, const std::byte* data, size_t bytes) override;
  Ticket receive(int member, Channel channel, std::byte* data, size_t bytes) override;
  void move() override;
  bool done(Ticket ticket) override;
  bool abandon() override;

 private:
  // Messages of a channel between two members take turns on so many connections.
  static constexpr uint64_t kStreams = 2;

  struct Transfer {  // what is left of a message
    std::byte* data;
    size_t bytes;
  };
  struct Line {  // one connection, made by its sender at its first message
    Rank peer = -1;
    TcpLine name = 0;
    bool sends = false;
    std::unique_ptr<TcpCaller> caller = nullptr;
    Fd fd = {};
    std::deque<Transfer> transfers = {};
    uint64_t posted = 0, complete = 0;  // messages
  };
  Ticket post(bool sends, int member, Channel channel, std::byte* data, size_t bytes);
  bool open(Line& line);
  void move(Line& line);
  void fail(const Line& line, const std::string& why);

  const std::shared_ptr<TcpEnds> ends_;
  const std::vector<Rank> ranks_;  // by member
  const uint64_t number_;
  std::vector<Line> lines_;       // by direction, member, channel and stream
  std::vector<uint64_t> posted_;  // messages, by direction, member and channel
  std::byte nothing_{};           // what a message without bytes carries
  WireFault fault_;
};

}  // namespace farandole
