// SPDX-License-Identifier: Apache-2.0
// Carries messages between the leaders of hosts, over one TCP connection per peer.
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

// A frame is a message with a number and with MACs under the connection's key. A process that relays a connection can
// end the connection, but cannot change, repeat, reorder, drop or add messages without being noticed.

class FrameWriter {
 public:
  explicit FrameWriter(const Key128& key = {}) : key_(key) {}
  ByteString frame(ByteView message);

 private:
  Key128 key_;
  uint64_t number_ = 0;
};

class FrameReader {
 public:
  struct Frame {
    ByteView message;
    size_t bytes;  // length of the complete frame
  };

  explicit FrameReader(const Key128& key = {}) : key_(key) {}
  // Returns the frame at the start of `arrived`, or nullopt if the frame is incomplete. Throws Error(kPeer) if it is
  // not the frame that the writer sent next. The connection is unusable after that.
  std::optional<Frame> next(ByteView arrived);

 private:
  Key128 key_;
  uint64_t number_ = 0;
};

// The links of a leader to its parent and its children in the HostTree. The messages of each peer keep their order.
// Only the driver may call these functions, except has_message().
class HostChannel {
 public:
  virtual ~HostChannel() = default;
  // Does not block: bytes that cannot be sent at once are queued. Drops the message if the connection has ended.
  virtual void send(Rank peer, ByteView message) = 0;
  // Ends the channel: sends the queued bytes, then drops received messages until all peers have ended as well, or until
  // `deadline`. This is the only function that blocks. Call it once.
  virtual void finish(Deadline deadline) = 0;

  using OnMessage = std::function<void(Rank, ByteView)>;
  // `how` is the rest of a sentence about the connection, such as "is lost: ...".
  using OnEnd = std::function<void(Rank, const std::string& how)>;
  // Sends queued bytes. Reports all messages that have arrived, in order. Reports the end of a connection after the
  // connection's last message. Returns false if there was nothing to do.
  virtual bool drain(const OnMessage& hear, const OnEnd& lose) = 0;
  // May be called from any thread. True if drain() has something to report.
  virtual bool has_message() const = 0;
};

class TcpHostChannel final : public HostChannel {
 public:
  // The kernel ends a connection if the peer acknowledges neither data nor probes for the duration of `timeout`.
  TcpHostChannel(std::vector<TcpPeer> peers, std::chrono::milliseconds timeout, Poller& poller);

  void send(Rank peer, ByteView message) override;
  void finish(Deadline deadline) override;
  bool drain(const OnMessage& hear, const OnEnd& lose) override;
  bool has_message() const override { return poller_.ready(); }

 private:
  struct Link {
    Rank rank = 0;
    Fd fd;
    bool changed = true;  // the socket has changed since drain() last used it
    bool open = true;     // can receive
    bool broken = false;  // cannot send
    bool ended = false;   // was shut down for writing
    ByteString arrived;   // the bytes of incomplete frames that have arrived
    FrameReader reader;
    FrameWriter writer;
    std::deque<ByteString> out;
    size_t out_done = 0;  // number of bytes of out.front() that have been sent
  };

  void read(Link& link, const OnMessage& hear, const OnEnd& lose);
  void take_messages(Link& link, const OnMessage& hear, const OnEnd& lose);
  void write(Link& link);
  // Shuts down the sending side of each link whose queue is empty. Returns true if all receiving sides have ended, too.
  bool say_last();
  void wait(Deadline deadline) const;
  std::string end_by(int error_number) const;  // 0 means that the peer has closed the connection

  std::map<Rank, Link> links_;
  const std::chrono::milliseconds timeout_;
  Poller& poller_;
  ByteString chunk_;  // buffer for receiving
};

}  // namespace farandole
