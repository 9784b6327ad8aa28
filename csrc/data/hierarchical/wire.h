// SPDX-License-Identifier: Apache-2.0
// The interface of the transports between hosts: MpiWire, TcpWire, and one used in tests. A wire carries only bytes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/types.h"

namespace farandole {

// The first failure on a wire. It is withheld for 1 s, because the coordinator's Abort usually gives a better reason.
class WireFault {
 public:
  void set(Rank rank, const std::string& host, const std::string& by, const std::string& why) {
    if (failure_) return;
    failure_ = {ErrorCode::kPeer,
                "rank " + std::to_string(rank) + " on " + host + " can't be reached by " + by +
                    " any more (" + why +
                    "): that rank died, or the network between the hosts is down"};
    due_ = Deadline::in(kControlDue);
  }
  explicit operator bool() const { return static_cast<bool>(failure_); }
  // Returns true if there is a failure that is still withheld. Throws the failure after 1 s.
  bool check() const {
    if (failure_ && due_.expired()) throw Error(failure_.code, failure_.text);
    return static_cast<bool>(failure_);
  }

 private:
  static constexpr std::chrono::seconds kControlDue{1};
  Failure failure_;
  Deadline due_ = Deadline::never();
};

// Carries messages between the members of one process set. Used only by the driver. Only abandon() may block, for at
// most 50 ms. A message's memory belongs to the backend, never to the user, and must stay valid until done() returns
// true. After a failure, done() returns false for 1 s and then throws an error. The caller must then call abandon().
class Wire {
 public:
  // In each channel, the n-th message from one member to another matches the n-th receive.
  enum class Channel { kPartial, kResult };
  static constexpr int kChannels = 2;
  using Ticket = int64_t;

  virtual ~Wire() = default;
  // Returns the size of the longest message that the wire transfers efficiently. This size limits the size of chunks.
  virtual size_t most_bytes() const = 0;
  // Starts a message. done() says when the message is complete, and reports a lost peer.
  virtual Ticket send(int member, Channel channel, const std::byte* data, size_t bytes) = 0;
  virtual Ticket receive(int member, Channel channel, std::byte* data, size_t bytes) = 0;
  // Makes progress on all messages. Must be called before done().
  virtual void move() = 0;
  // True if the rank's Poller wakes the driver when move() can make progress. Otherwise the driver must poll move().
  virtual bool wakes() const { return false; }
  // Returns true once the message is complete. From then on the ticket is invalid, and a sent message arrives without
  // further calls. Throws Error(kPeer), which names the rank, if a member cannot be reached.
  virtual bool done(Ticket ticket) = 0;
  // Drops the messages in flight. Returns false if the wire may access their memory until the process ends.
  virtual bool abandon() = 0;
};

}  // namespace farandole
