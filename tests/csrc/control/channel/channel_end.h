// SPDX-License-Identifier: Apache-2.0
// One end of a channel between hosts, and what has come on it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "control/channel/host_channel.h"

namespace farandole::check {

inline constexpr std::chrono::milliseconds kTimeout{5000};

inline ByteString bytes_of(const std::string& text) {
  auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// What has come on a channel, waited for message by message.
class ChannelInbox {
 public:
  // What the channel calls when something has come.
  void ring() {
    std::lock_guard lock(mutex_);
    ++rings_;
    rung_.notify_all();
  }

  // The next message of this peer; empty: it is gone.
  ByteString next(HostChannel& channel, Rank from) {
    for (;;) {
      const int seen = rings();
      channel.drain([&](Rank r, ByteView m) { got_[r].emplace_back(m.begin(), m.end()); });
      if (!got_[from].empty()) break;
      std::unique_lock lock(mutex_);
      if (!rung_.wait_for(lock, std::chrono::seconds(60), [&] { return rings_ > seen; })) {
        fail("no message came");
      }
    }
    ByteString message = std::move(got_[from].front());
    got_[from].pop_front();
    return message;
  }

 private:
  int rings() {
    std::lock_guard lock(mutex_);
    return rings_;
  }
  std::mutex mutex_;
  std::condition_variable rung_;
  int rings_ = 0;
  std::map<Rank, std::deque<ByteString>> got_;
};

// One leader: its connections, and what has come on them.
class End {
 public:
  explicit End(std::vector<TcpPeer> peers)
      : channel_(std::move(peers), kTimeout, [this] { inbox_.ring(); }) {}
  HostChannel& channel() { return channel_; }
  ByteString next(Rank from) { return inbox_.next(channel_, from); }

 private:
  ChannelInbox inbox_;
  HostChannel channel_;
};

}  // namespace farandole::check
