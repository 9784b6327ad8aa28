// SPDX-License-Identifier: Apache-2.0
// How reports reach the coordinator and the log reaches the ranks. Nothing here blocks.
#pragma once

#include <functional>
#include <span>

#include "control/protocol/message.h"

namespace farandole {

// Every rank's end.
class MemberChannel {
 public:
  virtual ~MemberChannel() = default;
  // Hands over one report; under the runtime's mutex. Rings the leader's bell only when told to.
  virtual void report(ByteView message) = 0;
  virtual void ring_leader() = 0;
  // Reports that found no room at first; under the runtime's mutex.
  virtual void flush() = 0;
  virtual bool can_flush() const = 0;
  // The next log entry, valid until the next call; empty: none now. The driver only.
  virtual ByteView next_entry() = 0;
  virtual bool has_entry() const = 0;
};

// The end beside the coordinator. The driver of the leader's rank only.
class LeaderChannel {
 public:
  virtual ~LeaderChannel() = default;
  using Visitor = std::function<void(Rank, ByteView)>;
  // Visits all reports that have come; false: there were none. An empty report: what this rank writes
  // can't be read any more.
  virtual bool drain(const Visitor& visit) = 0;
  virtual void publish(ByteView entry) = 0;
  // After a round of publish(): wakes those who have something to read.
  virtual void ring_members() = 0;
  virtual bool has_report() const = 0;
};

}  // namespace farandole
