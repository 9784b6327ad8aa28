// SPDX-License-Identifier: Apache-2.0
// One end of a channel between hosts, and what has come on it.
#pragma once

#include <chrono>
#include <deque>
#include <map>
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

// One leader: its connections, and what has come on them, waited for message by message.
class End {
 public:
  explicit End(std::vector<TcpPeer> peers) : channel_(std::move(peers), kTimeout, poller_) {}
  TcpHostChannel& channel() { return channel_; }

  // The next message of this peer.
  ByteString next(Rank from) {
    Heard heard = hear(from);
    if (heard.end) fail("the connection " + *heard.end);
    return std::move(heard.message);
  }
  // How the connection to this peer ended, after all of its messages.
  std::string end(Rank from) {
    const Heard heard = hear(from);
    if (!heard.end) fail("a message came instead of the end");
    return *heard.end;
  }
  // Sends and receives what is possible now. False: nothing has changed.
  bool work() {
    poller_.collect();
    return channel_.drain([&](Rank r, ByteView m) { got_[r].push_back({{m.begin(), m.end()}}); },
                          [&](Rank r, const std::string& how) { got_[r].push_back({{}, how}); });
  }

 private:
  struct Heard {
    ByteString message;
    std::optional<std::string> end = {};
  };
  Heard hear(Rank from) {
    for (work(); got_[from].empty(); work()) {
      const auto end = poller_.sleep(Poller::kDriver, Deadline::in(std::chrono::seconds(60)));
      if (end == FutexResult::kTimedOut) fail("no message came");
    }
    Heard heard = std::move(got_[from].front());
    got_[from].pop_front();
    return heard;
  }
  std::map<Rank, std::deque<Heard>> got_;
  Poller poller_;
  TcpHostChannel channel_;
};

}  // namespace farandole::check
