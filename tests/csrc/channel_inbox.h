// SPDX-License-Identifier: Apache-2.0
// What has come on a channel between hosts, waited for message by message.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "check.h"
#include "control/channel/host_channel.h"

namespace farandole::check {

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

}  // namespace farandole::check
