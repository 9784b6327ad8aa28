// SPDX-License-Identifier: Apache-2.0
// Carries messages between leaders of hosts, over one TCP connection per peer.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "control/protocol/codec.h"
#include "lib/net/siphash.h"
#include "lib/net/tcp_socket.h"
#include "lib/os/poller.h"

namespace farandole {

// A frame is a message with a number and MACs under the connection's key. A process that relays a connection can end
// it, but cannot change, repeat, reorder, drop or add a message without being noticed.

class FrameWriter {
 public:
  explicit FrameWriter(const Key128& key = {}) : key_(key) {}
  // Returns the next frame.
  ByteString frame(ByteView message);

 private:
  Key128 key_;
  uint64_t number_ = 0;
};

class FrameReader {
 public:
  struct Frame {
    ByteView message;
    size_t bytes;  // length of the whole frame
  };

  explicit FrameReader(const Key128& key = {}) : key_(key) {}
  // Returns the frame at the start of `arrived`, or nullopt if it is incomplete. Throws Error(kPeer) if it is not the
  // writer's next frame; the connection is then unusable.
  std::optional<Frame> next(ByteView arrived);

 private:
  Key128 key_;
  uint64_t number_ = 0;
};

// The links of a leader to its parent and children in the HostTree. Messages of one peer keep their order. Driver only,
// except has_message().
class HostChannel {
 public:
  virtual ~HostChannel() = default;
  // Does not block: queues bytes that cannot be sent at once. Drops a message to a peer that is gone.
  virtual void send(Rank peer, ByteView message) = 0;
  // Ends the channel: sends the queue, then drops received messages until all peers have ended too, or until
  // `deadline`. The only method that blocks. Call it once.
  virtual void finish(Deadline deadline) = 0;

  using OnMessage = std::function<void(Rank, ByteView)>;
  // `how`: the rest of a sentence about the connection, such as "is lost: ...".
  using OnEnd = std::function<void(Rank, const std::string& how)>;
  // Sends queued bytes. Reports all messages that have arrived, in order; a connection's end comes after its last
  // message. Returns false if there was nothing to do.
  virtual bool drain(const OnMessage& hear, const OnEnd& lose) = 0;
  // Any thread: true if drain() has something to report.
  virtual bool has_message() const = 0;
};

// HostChannel over TCP.
class TcpHostChannel final : public HostChannel {
 public:
  // `timeout`: the kernel ends a connection whose peer acknowledges neither data nor probes for this long.
  TcpHostChannel(std::vector<TcpPeer> peers, std::chrono::milliseconds timeout, Poller& poller);

  void send(Rank peer, ByteView message) override;
  void finish(Deadline deadline) override;
  bool drain(const OnMessage& hear, const OnEnd& lose) override;
  bool has_message() const override { return poller_.ready(); }

 private:
  struct Link {
    Rank rank = 0;
    Fd fd;
    bool changed = true;  // the socket has changed since drain() used it
    bool open = true;     // for receiving
    bool broken = false;  // for sending
    bool ended = false;   // shut down for writing
    ByteString arrived;   // received bytes of incomplete frames
    FrameReader reader;
    FrameWriter writer;
    std::deque<ByteString> out;
    size_t out_done = 0;  // bytes of out.front() that were sent
  };

  void read(Link& link, const OnMessage& hear, const OnEnd& lose);
  void take_messages(Link& link, const OnMessage& hear, const OnEnd& lose);
  void write(Link& link);
  // Ends the sending side of links with an empty queue. True if all receiving sides have ended, too.
  bool say_last();
  void wait(Deadline deadline) const;
  std::string end_by(int error_number) const;  // 0: the peer has closed the connection

  std::map<Rank, Link> links_;
  const std::chrono::milliseconds timeout_;
  Poller& poller_;
  ByteString chunk_;  // receive buffer
};

}  // namespace farandole
