// SPDX-License-Identifier: Apache-2.0
// Messages between leaders of hosts: one TCP connection per peer, and one thread that sleeps in epoll on all.
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

// Frames carry messages between hosts, each with its number and MACs under the connection's own key. Whoever relays a
// connection can end it, but cannot change, repeat, reorder, drop or add a message unnoticed.

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
  // Returns the frame at the start of `arrived`, or none if it is incomplete. Throws Error(kPeer) if it is not the
  // writer's next one; the connection is then unusable.
  std::optional<Frame> next(ByteView arrived);

 private:
  Key128 key_;
  uint64_t number_ = 0;
};

// Links between hosts, used by a leader and its tree. Messages of one peer keep their order.
class HostChannel {
 public:
  virtual ~HostChannel() = default;
  // Any thread. Never blocks: queues what cannot be sent at once. Drops messages to a peer that is gone.
  virtual void send(Rank peer, ByteView message) = 0;
  // Ends the channel, once: sends the queue, then receives until all peers have ended, or until `deadline`. Blocks, as
  // no other method does. drain() still reports what has come.
  virtual void finish(Deadline deadline) = 0;

  using OnMessage = std::function<void(Rank, ByteView)>;
  // `how` completes the connection's name: "is lost: ...".
  using OnEnd = std::function<void(Rank, const std::string& how)>;
  // Driver only. Reports all that has come, in order; the end of a peer's connection is its last event. False: nothing.
  virtual bool drain(const OnMessage& hear, const OnEnd& lose) = 0;
  // Any thread: true if drain() has something to report.
  virtual bool has_message() const = 0;
};

class TcpHostChannel final : public HostChannel {
 public:
  // `timeout`: the kernel gives up a peer that acknowledges neither data nor probes for this long. `notify` is called
  // on the channel's thread when a message has come.
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
    ByteString arrived;            // start of a frame; thread only
    FrameReader reader;            // thread only
    FrameWriter writer;            // under the mutex, like all below
    std::deque<ByteString> out;
    size_t out_done = 0;  // bytes of the first one that were sent
    uint32_t events = 0;  // registered with epoll
    bool broken = false;  // no more sending
    bool ended = false;   // shut down for writing
  };
  struct Arrival {
    Rank from;
    ByteString message;
    std::optional<std::string> end = {};  // set instead of a message when the connection has ended
  };

  void run();
  void wake();
  // True if the thread should end. Under the mutex.
  bool over();
  // Ends the sending side of links with an empty queue. True if all receiving sides have ended, too.
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
