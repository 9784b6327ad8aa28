// SPDX-License-Identifier: Apache-2.0
// One end of a channel between hosts, and what has come on it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
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

  // The next message of this peer.
  ByteString next(TcpHostChannel& channel, Rank from) {
    Heard heard = hear(channel, from);
    if (heard.end) fail("the connection " + *heard.end);
    return std::move(heard.message);
  }
  // How the connection to this peer ended, after all of its messages.
  std::string end(TcpHostChannel& channel, Rank from) {
    const Heard heard = hear(channel, from);
    if (!heard.end) fail("a message came instead of the end");
    return *heard.end;
  }

 private:
  struct Heard {
    ByteString message;
    std::optional<std::string> end = {};
  };
  Heard hear(TcpHostChannel& channel, Rank from) {
    for (;;) {
      const int seen = rings();
      channel.drain([&](Rank r, ByteView m) { got_[r].push_back({{m.begin(), m.end()}}); },
                    [&](Rank r, const std::string& how) { got_[r].push_back({{}, how}); });
      if (!got_[from].empty()) break;
      std::unique_lock lock(mutex_);
      if (!rung_.wait_for(lock, std::chrono::seconds(60), [&] { return rings_ > seen; })) {
        fail("no message came");
      }
    }
    Heard heard = std::move(got_[from].front());
    got_[from].pop_front();
    return heard;
  }
  int rings() {
    std::lock_guard lock(mutex_);
    return rings_;
  }
  std::mutex mutex_;
  std::condition_variable rung_;
  int rings_ = 0;
  std::map<Rank, std::deque<Heard>> got_;
};

// One leader: its connections, and what has come on them.
class End {
 public:
  explicit End(std::vector<TcpPeer> peers)
      : channel_(std::move(peers), kTimeout, [this] { inbox_.ring(); }) {}
  TcpHostChannel& channel() { return channel_; }
  ByteString next(Rank from) { return inbox_.next(channel_, from); }
  std::string end(Rank from) { return inbox_.end(channel_, from); }

 private:
  ChannelInbox inbox_;
  TcpHostChannel channel_;
};

}  // namespace farandole::check
