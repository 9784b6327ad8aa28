// SPDX-License-Identifier: Apache-2.0
// The messages of one kind of one block, posted and completed in order; each with a checksum behind it, if the wire's
// have one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "data/hierarchical/wire.h"
#include "kernels/crc32c.h"

namespace farandole {

struct Message {
  int32_t peer;    // a member
  uint32_t chunk;  // of the block
  size_t offset;   // in the block's arena
  size_t bytes;
  Wire::Ticket ticket = -1;
};

// A message's CRC-32C. Its memory has room for that behind it.
using Checksum = uint32_t;

class MessageQueue {
 public:
  void clear() { messages_.clear(), done_ = posted_ = 0; }
  void add(const Message& message) { messages_.push_back(message); }
  const std::vector<Message>& messages() const { return messages_; }

  // `sum_bytes`: sizeof(Checksum), or 0: none.
  void send_all(Wire& wire, Wire::Channel channel, std::byte* arena, size_t sum_bytes) {
    for (; posted_ < messages_.size(); ++posted_) {
      Message& m = messages_[posted_];
      std::byte* const data = arena + m.offset;
      const bool again =
          posted_ > 0 && messages_[posted_ - 1].offset == m.offset;  // to another host
      if (sum_bytes > 0 && !again) {
        const Checksum sum = kernels::crc32c(data, m.bytes);
        std::memcpy(data + m.bytes, &sum, sizeof sum);
      }
      m.ticket = wire.send(m.peer, channel, data, m.bytes + sum_bytes);
    }
  }
  void receive_all(Wire& wire, Wire::Channel channel, std::byte* arena, size_t sum_bytes) {
    for (; posted_ < messages_.size(); ++posted_) {
      Message& m = messages_[posted_];
      m.ticket = wire.receive(m.peer, channel, arena + m.offset, m.bytes + sum_bytes);
    }
  }
  // Whether a message with a checksum has arrived as it was sent.
  static bool intact(const Message& message, const std::byte* arena) {
    Checksum sum;
    std::memcpy(&sum, arena + message.offset + message.bytes, sizeof sum);
    return sum == kernels::crc32c(arena + message.offset, message.bytes);
  }

  // Polls messages until one is incomplete, and calls completed(message) for each that has become complete. True:
  // there was one.
  template <class Completed>
  bool look(Wire& wire, Completed&& completed) {
    const size_t before = done_;
    while (done_ < posted_ && wire.done(messages_[done_].ticket)) completed(messages_[done_++]);
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
