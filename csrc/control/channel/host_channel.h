// SPDX-License-Identifier: Apache-2.0
// Messages between a host's leader and the leaders linked with it, and the thread that moves them. Nothing
// here blocks but finish().
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/types.h"
#include "control/protocol/codec.h"

namespace farandole {

class HostChannel {
 public:
  // notify: something has come. On the channel's thread.
  explicit HostChannel(std::function<void()> notify) : notify_(std::move(notify)) {}
  virtual ~HostChannel() = default;
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  // Any thread. What does not go at once waits in private memory. To a peer that is gone: dropped.
  virtual void send(Rank peer, ByteView message) = 0;
  // The end: what waits goes out, then we say no more and listen until all peers have ended, too.
  void finish(Deadline deadline);

  // Visits what has come, in order; an empty message is the last: that peer is gone. The driver only.
  using Visitor = std::function<void(Rank, ByteView)>;
  bool drain(const Visitor& visit);
  bool has_message() const { return has_message_; }
  // What ended the connection to a peer that is gone; empty: the peer itself did.
  std::string trouble_of(Rank peer) const;

 protected:
  // At the end of the child's constructor, and at the beginning of its destructor.
  void start(const char* name);
  void stop();
  // The thread, which ends when over() is true. Under the mutex; says the last words on the way.
  virtual void run() = 0;
  virtual void wake() = 0;
  bool over();
  // Our last words on links where nothing waits to be sent; true: nothing is to come on any link, either.
  virtual bool say_last() = 0;

  // On the channel's thread.
  void deliver(Rank from, ByteString message);
  void deliver_end(Rank from, std::string trouble);

  std::mutex mutex_;  // over the links; may be held when the inbox's is taken
  bool finishing_ = false;
  Deadline finish_by_ = Deadline::never();

 private:
  std::function<void()> notify_;
  std::thread thread_;
  bool stop_ = false;
  mutable std::mutex inbox_mutex_;
  std::deque<std::pair<Rank, ByteString>> inbox_;
  std::map<Rank, std::string> troubles_;
  std::atomic<bool> has_message_{false};
};

}  // namespace farandole
