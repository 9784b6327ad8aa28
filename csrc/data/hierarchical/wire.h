// SPDX-License-Identifier: Apache-2.0
// The interface of transports between hosts: MpiWire, TcpWire, and one in tests. It knows neither tensors nor blocks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/types.h"

namespace farandole {

// The first failure on a wire. Withheld for 1 s, in which the coordinator's Abort usually gives a better reason.
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
  // True if there is a failure. Throws it when its time has come.
  bool check() const {
    if (failure_ && due_.expired()) throw Error(failure_.code, failure_.text);
    return static_cast<bool>(failure_);
  }

 private:
  static constexpr std::chrono::seconds kControlDue{1};
  Failure failure_;
  Deadline due_ = Deadline::never();
};

// Messages between members of one process set. Driver only; only abandon() may block, for 50 ms. A message's memory
// is the backend's, never the user's, and must stay valid until done() returns true. After a failure done() returns
// false, later it throws; then abandon() the wire.
class Wire {
 public:
  // Messages between two members arrive in order per channel, and match receives in the order posted.
  enum class Channel { kPartial, kResult };
  static constexpr int kChannels = 2;
  using Ticket = int64_t;

  virtual ~Wire() = default;
  // Longest message that is transferred efficiently. The schedule cuts chunks accordingly.
  virtual size_t most_bytes() const = 0;
  // Start a message, which is complete when done() says so. A lost peer shows there, too.
  virtual Ticket send(int member, Channel channel, const std::byte* data, size_t bytes) = 0;
  virtual Ticket receive(int member, Channel channel, std::byte* data, size_t bytes) = 0;
  // Makes progress on all messages. Call it before done().
  virtual void move() = 0;
  // True if the rank's Poller wakes the driver as soon as move() can make progress. False: call move() again and again.
  virtual bool wakes() const { return false; }
  // True: complete, and the ticket becomes invalid; a sent message then arrives without further calls. Throws
  // Error(kPeer) with the rank if a member cannot be reached.
  virtual bool done(Ticket ticket) = 0;
  // Gives up messages in flight. False: their memory may be accessed until the process ends.
  virtual bool abandon() = 0;
};

}  // namespace farandole
