// SPDX-License-Identifier: Apache-2.0
// One member's work on a block in flight between hosts: the member's tasks for chunks, its messages, and their memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/hierarchical/hierarchical_schedule.h"
#include "data/hierarchical/wire.h"

namespace farandole {

// One message of a block. The messages of a MessageQueue start and complete in order.
struct Message {
  int32_t peer;    // a member
  uint32_t chunk;  // index in the block
  size_t offset;   // offset in the block's arena
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
  // Tests messages in order, up to the first incomplete one. Returns true if at least one message has completed.
  bool look(Wire& wire) {
    const size_t before = done_;
    while (done_ < posted_ && wire.done(messages_[done_].ticket)) ++done_;
    return done_ > before;
  }
  bool complete() const { return done_ == messages_.size(); }
  bool under_way() const { return done_ < posted_; }
  const Message& next() const { return messages_[done_]; }  // may be called only if under_way()

 private:
  std::vector<Message> messages_;
  size_t posted_ = 0;
  size_t done_ = 0;
};

bool host_has(const Part& part, const HostMap& hosts, int host);

struct BlockTransfer {
  // This member's tasks for one chunk.
  struct ChunkTask {
    uint32_t chunk;         // index in the block
    bool reduces = false;   // as the reducer, makes this host's partial result
    bool combines = false;  // as the combiner, makes the result from partials or receives it
    bool relays = false;    // as a relay, receives the result
    size_t partial = 0;     // offset in `arena`
    size_t result = 0;      // offset in `arena`
    size_t first_in = 0, last_in = 0;  // range of the chunk's messages in partials_in
  };

  HierarchicalBlock block;
  std::vector<ChunkTask> tasks;
  MessageQueue partials_in, partials_out, results_in, results_out;
  std::vector<std::byte> arena;  // holds all messages; the wire accesses no other memory
  size_t arena_bytes = 0;

  // Makes the tasks and messages for `block`. Does not touch `arena`, which may still be in use.
  void plan(const HostMap& hosts, int member, std::span<const Part> parts);
  bool complete() const {
    return partials_in.complete() && partials_out.complete() && results_in.complete() &&
           results_out.complete();
  }
  bool under_way() const {
    return partials_in.under_way() || partials_out.under_way() || results_in.under_way() ||
           results_out.under_way();
  }

 private:
  struct Planner;
};

}  // namespace farandole
