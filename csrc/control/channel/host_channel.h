// SPDX-License-Identifier: Apache-2.0
// Messages between leaders of hosts: one TCP connection per peer, and one thread that sleeps in epoll on all of
// them. Only finish() blocks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/types.h"
#include "control/protocol/codec.h"
#include "lib/net/siphash.h"
#include "lib/net/tcp_socket.h"
#include "lib/os/thread.h"

namespace farandole {

// Messages between hosts as they travel: each in a frame with its number and MACs under the connection's own key. Who
// relays a connection can end it, but can't change, repeat, reorder, drop or add a message unnoticed.

// One direction of a connection.
class FrameWriter {
 public:
  explicit FrameWriter(const Key128& key = {}) : key_(key) {}
  // The next frame.
  ByteString frame(ByteView message);

 private:
  Key128 key_;
  uint64_t number_ = 0;
};

// The other end of it.
class FrameReader {
 public:
  struct Frame {
    ByteView message;
    size_t bytes;  // of the whole frame
  };

  explicit FrameReader(const Key128& key = {}) : key_(key) {}
  // The frame that `arrived` begins with; none: it is not whole yet. Throws Error(kPeer) if it is not the next one of
  // the writer's; the connection is of no use then.
  std::optional<Frame> next(ByteView arrived);

 private:
  Key128 key_;
  uint64_t number_ = 0;
};

// The links between hosts, as a leader and its tree use them.
class HostChannel {
 public:
  virtual ~HostChannel() = default;
  // Any thread. Queues what can't be sent at once; drops messages to a peer that is gone.
  virtual void send(Rank peer, ByteView message) = 0;
  // Ends the channel: sends what is queued, then receives until all peers have ended too.
  virtual void finish(Deadline deadline) = 0;

  using OnMessage = std::function<void(Rank, ByteView)>;
  // `how`, behind the connection's name: "is lost: ...".
  using OnEnd = std::function<void(Rank, const std::string& how)>;
  // Tells what has come, in order; the end of a peer's connection is its last. The driver only.
  virtual bool drain(const OnMessage& hear, const OnEnd& lose) = 0;
  virtual bool has_message() const = 0;
};

class TcpHostChannel final : public HostChannel {
 public:
  // `timeout`: after which the kernel gives up a peer that acknowledges neither data nor probes. `notify` is
  // called on the channel's thread when a message has come.
  TcpHostChannel(std::vector<TcpPeer> peers, std::chrono::milliseconds timeout,
                 std::function<void()> notify);
  ~TcpHostChannel() override;
  TcpHostChannel(const TcpHostChannel&) = delete;
  TcpHostChannel& operator=(const TcpHostChannel&) = delete;

  void send(Rank peer, ByteView message) override;
  void finish(Deadline deadline) override;
  bool drain(const OnMessage& hear, const OnEnd& lose) override;
  bool has_message() const override { return has_message_; }

 private:
  struct Link {
    Rank rank = 0;
    Fd fd;
    std::atomic<bool> open{true};  // for receiving
    ByteString arrived;            // beginning of a frame; the thread only
    FrameReader reader;            // likewise
    FrameWriter writer;            // guarded by the mutex, like all below
    std::deque<ByteString> out;
    size_t out_done = 0;  // bytes sent of the first one
    uint32_t events = 0;  // that epoll waits for
    bool broken = false;  // for sending
    bool ended = false;   // shut down for writing
  };
  struct Arrival {
    Rank from;
    ByteString message;
    std::optional<std::string> end = {};  // how the connection has ended, instead of a message
  };

  void run();
  void wake();
  // Whether the thread should end; under the mutex.
  bool over();
  // Ends the sending side of links with an empty queue; true: the receiving side of all has ended, too.
  bool say_last();
  void read(Link& link);
  void take_messages(Link& link);
  void close(Link& link, std::string how);
  std::string end_by(int error_number) const;  // 0: the peer has closed it
  void write(Link& link);
  void watch(Link& link, int operation);
  void deliver(Arrival arrival);

  std::mutex mutex_;  // guards the links; taken before inbox_mutex_
  std::map<Rank, Link> links_;
  bool stop_ = false;
  bool finishing_ = false;
  Deadline finish_by_ = Deadline::never();
  const std::chrono::milliseconds timeout_;
  ByteString chunk_;  // the thread's receive buffer
  Fd epoll_;
  Fd wake_;
  const std::function<void()> notify_;
  std::mutex inbox_mutex_;
  std::deque<Arrival> inbox_;
  std::atomic<bool> has_message_{false};
  Thread thread_;
};

}  // namespace farandole
