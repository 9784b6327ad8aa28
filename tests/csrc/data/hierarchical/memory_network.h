// SPDX-License-Identifier: Apache-2.0
// A wire within one process: messages between members that are threads, or that one thread steps. They
// take their time, and overtake each other wherever a real wire may let them.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "check.h"
#include "data/hierarchical/wire.h"
#include "random.h"

namespace farandole::check {

class MemoryNetwork : public std::enable_shared_from_this<MemoryNetwork> {
 public:
  // patience: after so many looks at most, a message that both sides have posted is complete.
  MemoryNetwork(uint64_t seed, size_t patience) : random_(seed), patience_(patience) {}

  std::unique_ptr<Wire> counter(int member) { return std::make_unique<Counter>(*this, member); }

  size_t bytes() {
    std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  struct Letter {
    const std::byte* from = nullptr;
    std::byte* to = nullptr;
    size_t bytes = 0;
    size_t looks_left = 0;
    bool delivered = false;
  };
  using Route = std::tuple<int, int, Wire::Channel>;  // from, to
  struct Box {
    std::deque<std::shared_ptr<Letter>> sends, receives;  // not matched yet
  };

  class Counter final : public Wire {
   public:
    Counter(MemoryNetwork& network, int member)
        : network_(network.shared_from_this()), member_(member) {}

    Ticket send(int member, Channel channel, const std::byte* data, size_t bytes) override {
      return keep(network_->post({member_, member, channel}, true, data, nullptr, bytes));
    }
    Ticket receive(int member, Channel channel, std::byte* data, size_t bytes) override {
      return keep(network_->post({member, member_, channel}, false, nullptr, data, bytes));
    }
    size_t most_bytes() const override { return 48 * 1024; }
    void move() override {}
    bool done(Ticket ticket) override {
      std::shared_ptr<Letter>& letter = letters_.at(static_cast<size_t>(ticket));
      CHECK(letter != nullptr);
      if (!network_->look(*letter)) return false;
      letter.reset();
      return true;
    }
    bool abandon() override {
      letters_.clear();
      return true;
    }

   private:
    Ticket keep(std::shared_ptr<Letter> letter) {
      letters_.push_back(std::move(letter));
      return static_cast<Ticket>(letters_.size() - 1);
    }
    const std::shared_ptr<MemoryNetwork> network_;
    const int member_;
    std::vector<std::shared_ptr<Letter>> letters_;
  };

  std::shared_ptr<Letter> post(const Route& route, bool sends, const std::byte* from, std::byte* to,
                               size_t bytes) {
    std::lock_guard lock(mutex_);
    CHECK(std::get<0>(route) != std::get<1>(route));
    Box& box = boxes_[route];
    auto& waiting = sends ? box.receives : box.sends;
    if (waiting.empty()) {
      auto letter = std::make_shared<Letter>(Letter{from, to, bytes});
      (sends ? box.sends : box.receives).push_back(letter);
      return letter;
    }
    std::shared_ptr<Letter> letter = waiting.front();
    waiting.pop_front();
    CHECK_EQ(letter->bytes, bytes);
    if (sends) {
      letter->from = from;
    } else {
      letter->to = to;
    }
    letter->looks_left = 1 + random_.below(patience_);
    bytes_ += bytes;
    return letter;
  }

  bool look(Letter& letter) {
    std::lock_guard lock(mutex_);
    if (letter.delivered) return true;
    if (letter.looks_left == 0 || --letter.looks_left > 0) return false;
    if (letter.bytes > 0) std::memcpy(letter.to, letter.from, letter.bytes);
    letter.delivered = true;
    return true;
  }

  std::mutex mutex_;
  Random random_;
  const size_t patience_;
  std::map<Route, Box> boxes_;
  size_t bytes_ = 0;
};

}  // namespace farandole::check
