// SPDX-License-Identifier: Apache-2.0
// The leader of a host that is not the root's: reports go up, the log comes down.
#pragma once

#include "control/hosts/aggregator.h"
#include "control/hosts/host_leader.h"

namespace farandole {

class Relay final : public HostLeader {
 public:
  explicit Relay(Setup setup);
  bool step() override;
  Deadline next_tick() const override { return Deadline::at(aggregator_.next_tick()); }

 private:
  void hear(Rank peer, ByteView message);
  void read_log(ByteView entries);
  void read(const Entry& entry);
  void report(Rank from, const Report& report);
  void close();

  Aggregator aggregator_;
  ByteString encoded_;
  bool over_ = false;  // the log has ended, well or badly
};

}  // namespace farandole
