// SPDX-License-Identifier: Apache-2.0
// The messages of one kind of one block, posted and completed in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "data/hierarchical/wire.h"

namespace farandole {

struct Message {
  int32_t peer;    // a member
  uint32_t chunk;  // of the block
  size_t offset;   // in the block's arena
  size_t bytes;
  Wire::Ticket ticket = -1;
};

class MessageQueue {
 public:
  void clear() { messages_.clear(), done_ = posted_ = 0; }
  void add(const Message& message) { messages_.push_back(message); }
  const std::vector<Message>& messages() const { return messages_; }

  void send_all(Wire& wire, Wire::Channel channel, const std::byte* arena) {
    for (; posted_ < messages_.size(); ++posted_) {
      Message& m = messages_[posted_];
      m.ticket = wire.send(m.peer, channel, arena + m.offset, m.bytes);
    }
  }
  void receive_all(Wire& wire, Wire::Channel channel, std::byte* arena) {
    for (; posted_ < messages_.size(); ++posted_) {
      Message& m = messages_[posted_];
      m.ticket = wire.receive(m.peer, channel, arena + m.offset, m.bytes);
    }
  }

  // Polls messages until one is incomplete. True: at least one has become complete.
  bool look(Wire& wire) {
    const size_t before = done_;
    while (done_ < posted_ && wire.done(messages_[done_].ticket)) ++done_;
    return done_ > before;
  }
  bool complete() const { return done_ == messages_.size(); }
  bool under_way() const { return done_ < posted_; }
  const Message& next() const { return messages_[done_]; }  // only if under_way()

 private:
  std::vector<Message> messages_;
  size_t posted_ = 0;
  size_t done_ = 0;
};

}  // namespace farandole
