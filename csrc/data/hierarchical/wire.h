// SPDX-License-Identifier: Apache-2.0
// The interface of transports between hosts (MpiWire, TcpWire, one in tests): messages between members of one
// process set. A wire knows neither tensors nor blocks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/types.h"

namespace farandole {

// The first failure on a wire, withheld for 1 s, because the coordinator's Abort usually comes in that time
// and gives a better reason.
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
  // True: there is a failure. Throws it once its time has come.
  bool check() const {
    if (failure_ && due_.expired()) throw Error(failure_.code, failure_.text);
    return static_cast<bool>(failure_);
  }

 private:
  static constexpr std::chrono::seconds kControlDue{1};
  Failure failure_;
  Deadline due_ = Deadline::never();
};

// The driver only. A message's memory stays in use until done() is true; it is the backend's staging memory,
// never the user's.
class Wire {
 public:
  // Messages between two members arrive in order per channel, matching receives in the order posted.
  enum class Channel { kPartial, kResult };
  static constexpr int kChannels = 2;
  using Ticket = int64_t;

  virtual ~Wire() = default;
  // The longest message that is transferred efficiently; the schedule cuts chunks accordingly.
  virtual size_t most_bytes() const = 0;
  virtual Ticket send(int member, Channel channel, const std::byte* data, size_t bytes) = 0;
  virtual Ticket receive(int member, Channel channel, std::byte* data, size_t bytes) = 0;
  // Makes progress on all messages; call it before done().
  virtual void move() = 0;
  // True: complete, and the ticket is invalid from now on; a sent message then arrives without further calls.
  // Throws Error(kPeer) naming the rank if a member can't be reached any more.
  virtual bool done(Ticket ticket) = 0;
  // Gives up messages in flight. False: their memory may still be accessed until the process ends.
  virtual bool abandon() = 0;
};

}  // namespace farandole
