// SPDX-License-Identifier: Apache-2.0
// Messages between the hosts of one process set. What lies behind it (MPI, TCP, a test's memory) knows
// neither tensors nor blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole {

// The driver only. Memory of a message stays in use until done() has said so; it is the plane's staging,
// never the user's.
class Wire {
 public:
  // Messages between two members arrive in order per channel, at the receives that were posted in order.
  enum class Channel { kPartial, kResult };
  static constexpr int kChannels = 2;
  using Ticket = int64_t;

  virtual ~Wire() = default;
  // Of the messages into which a block is cut: the longest that travels well.
  virtual size_t most_bytes() const = 0;
  virtual Ticket send(int member, Channel channel, const std::byte* data, size_t bytes) = 0;
  virtual Ticket receive(int member, Channel channel, std::byte* data, size_t bytes) = 0;
  // Moves what can move now; before done() is asked about messages.
  virtual void move() = 0;
  // True: complete, and the ticket is spent. A message that is sent arrives without further calls then.
  // Throws Error(kPeer) that names the rank when a member can't be reached any more.
  virtual bool done(Ticket ticket) = 0;
  // Gives up what is under way. False: its memory may be touched until the process ends.
  virtual bool abandon() = 0;
};

}  // namespace farandole
